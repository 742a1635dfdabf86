"""`bigtrain completion`: shell completion script for commands, options, recipes and
settings.

The script is static: pressing TAB does not start Python, which would take a fifth of a second each
time only to import the settings. Hence shtab, which writes a script from an argparse parser,
not argcomplete, which calls the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bigtrain.commands.registry import COMMANDS, CommandParser, build_parser
from bigtrain.system.arguments import Argument
from bigtrain.system.shipped_files import ds_configs

Shell = Literal["bash", "zsh", "fish"]
# Settings end with "=", after which a value follows and no space; other words get one.
_BASH_WITHOUT_SPACE = """
_bigtrain() {
  _shtab_bigtrain "$@"
  [[ "${COMPREPLY[*]}" == *= ]] && compopt -o nospace
  return 0
}
complete -o bashdefault -o default -F _bigtrain bigtrain
"""


@dataclass(frozen=True, kw_only=True)
class CompletionArguments:
    """Command line of `bigtrain completion`."""

    shell: Annotated[Shell, Argument("shell")]
    """for bash: eval "$(bigtrain completion bash)" in ~/.bashrc; for zsh: the same in ~/.zshrc
    after compinit; for fish: bigtrain completion fish > ~/.config/fish/completions/bigtrain.fish"""


def run(args: CompletionArguments) -> int:
    """Print the script."""
    print(completion_script(args.shell))
    return 0


def completion_script(shell: Shell) -> str:
    """Return the script for a shell."""
    import shtab

    from bigtrain.settings.commented_yaml import setting_names
    from bigtrain.settings.loading import recipe_names

    parser = build_parser(*COMMANDS)
    for subparser in _command_parsers(parser):
        for action in subparser._actions:
            if action.dest in _COMPLETED_ARGUMENTS:
                name = _function_name(action.dest)
                calls = {"bash": name, "zsh": name, "fish": f"({name})"}
                action.complete = calls  # type: ignore[attr-defined]
            elif action.type is Path or _PATH_OPTIONS.intersection(action.option_strings):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    words = {
        "config": recipe_names(),
        "deepspeed_config": sorted(path.stem for path in ds_configs().glob("*.json")),
        "overrides": [f"{name}=" for name in setting_names()],
    }
    functions = "\n".join(_function_texts(shell, words))
    script: str = shtab.complete(parser, shell, preamble=functions)
    return script + _BASH_WITHOUT_SPACE if shell == "bash" else script


def _command_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands, including nested ones."""
    if isinstance(parser, CommandParser):
        for command in parser.commands.values():
            yield command
            yield from _command_parsers(command)


_PATH_OPTIONS = {"--input", "--model", "--tokenizer"}
"""Options with a path or a name of the Hub."""
_COMPLETED_ARGUMENTS = ("config", "deepspeed_config", "overrides")
"""Arguments whose words are completed, by their names in the parser; all but overrides also accept
paths."""


def _function_name(name: str) -> str:
    return f"_bigtrain_words_of_{name}"


def _function_texts(shell: str, words: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield, for each argument in `words`, a shell function that completes its words."""
    for argument, candidates in words.items():
        function, joined = _function_name(argument), " ".join(candidates)
        takes_path = argument != "overrides"
        if shell == "bash":
            paths = '\n  compgen -f -- "$1"' if takes_path else ""
            yield f'{function}() {{\n  compgen -W "{joined}" -- "$1"{paths}\n}}'
        elif shell == "zsh":
            paths = "\n  _files" if takes_path else ""
            space = "" if takes_path else "-S '' "
            yield f"{function}() {{\n  compadd {space}-- {joined}{paths}\n}}"
        else:
            paths = "\n  __fish_complete_path (commandline -ct)" if takes_path else ""
            yield f"function {function}\n  printf '%s\\n' {joined}{paths}\nend"

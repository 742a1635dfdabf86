"""The data pipeline: from files of text to the micro-batches of one data-parallel rank.

Imports `system` and `settings`, no models; `engine`, `run` and the commands import it. In pipeline
order: `documents` finds inputs and reads documents from them, `tokenizers` and `chat` encode them,
`tokenize_job` distributes that over workers and writes `shards`, `samples` maps sample i of a run
to its tokens, `loading` makes micro-batches. Start with `tokenize_job/job` for `bigtrain tokenize`,
with `loading/loader` for what a training run reads.
"""

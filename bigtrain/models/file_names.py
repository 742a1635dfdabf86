"""Names of small files in a Hugging Face directory. Pure."""

ADAPTER_CONFIG = "adapter_config.json"
GENERATION_CONFIG = "generation_config.json"

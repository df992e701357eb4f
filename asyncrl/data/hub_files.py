"""The files of a model of the Hugging Face Hub, in the cache of this machine.

A process asks the Hub for them once, when it starts, and from then on reads their folder. A request later in the run
would wait for minutes if the Hub does not answer, and might find another revision.
"""

import os

from asyncrl.data.light_tokenizer import cached_files

_DESCRIPTION = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
"""Files of the configuration, of the generation defaults, and of the tokenizer with its templates."""
_WEIGHTS = ["*.safetensors", "pytorch_model*.bin"]
_OTHER_FORMATS = ["*/*.safetensors", "*/*.bin", "consolidated*"]
"""Weights in folders, and in Mistral's own format: copies for other programs."""


def model_folder(model: str, *, weights: bool) -> str:
    """Returns the folder of a model: `model` itself if it is a folder, else its snapshot in the Hub's cache.

    Downloads the files that the cache lacks, those with the weights only if `weights` is true. If the Hub does not
    answer, returns the snapshot in the cache. If there is none, returns `model`: loading it then raises an error with
    the cause.
    """
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = _DESCRIPTION + (_WEIGHTS if weights else [])
    try:
        return snapshot_download(model, allow_patterns=patterns, ignore_patterns=_OTHER_FORMATS)
    except (OSError, ValueError, HfHubHTTPError):  # not in the cache, or not known to be complete
        return str(cached_files(model) or model)

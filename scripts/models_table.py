"""Rewrites docs/models.md from the families that load and the goldens that test them.

python scripts/models_table.py            rewrites it
python scripts/models_table.py --check    only says whether it is up to date
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
GOLDENS = ROOT / "tests" / "data" / "families"
NESTED = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}  # the text model inside

# Whose text models other architectures' files hold: those files say no more.
READ_AS = {"MistralForCausalLM": "llama", "Gemma3ForConditionalGeneration": "gemma3"}

BEFORE = """# Models

Written by `scripts/models_table.py`; `scripts/lint.sh` says when it is out of date.

Each family is one file in `paged_jax/models/`. A folder whose `config.json` names another
architecture is refused, with this list.

| architecture | Hugging Face | GGUF | paged parity | tensor parallel |
|---|---|---|---|---|
"""
AFTER = """
- **Hugging Face**: loads safetensors, in the newest dialect of `config.json` and in older ones.
- **GGUF**: the architecture's name in the files that are read.
- **paged parity**: tiny random models of the family with which `tests/test_families.py` gets the
  logits of transformers 5.24 in float32 (within 2e-4), and the same greedy tokens from the engine
  in chunks of 8 tokens, after preemption, and from the prefix cache.
- **tensor parallel**: the same models with their weights and KV heads cut over 2 simulated devices,
  in `tests/test_tensor_parallel.py`: the same greedy tokens, also after preemption
  ([tensor_parallel.md](tensor_parallel.md)).

What to know:

- gpt-oss is read in MXFP4 and computed in the engine's dtype.
- LongRoPE (Phi 3 and 4) has one table for short contexts and one for long ones. An engine uses one
  of them for all sequences: the long one if `max_model_len` is above the length of training.
- A tokenizer comes from `tokenizer.json`; where there is none, from Mistral's `tekken.json` or
  SentencePiece's `tokenizer.model` (BPE and unigram). Both are read without further packages.
- GGUF files of Mistral and Mixtral call themselves `llama`; Mistral's say nothing of a window.
- Dynamic NTK scaling changes nothing up to `max_position_embeddings`, and no engine goes beyond.
- Of models that see images (`Gemma3ForConditionalGeneration`) the text model is served.
- Weights from a GGUF file are float32 on disk, whatever their type was: gpt-oss of 20 billion
  parameters takes 84 GB there.
"""


def page() -> str:
    """The page as it should be."""
    from paged_jax.checkpoint.gguf_families import FAMILIES as FILES
    from paged_jax.checkpoint.gguf_families import MIXTRAL
    from paged_jax.models import FAMILIES

    goldens: dict[str, list[str]] = {}
    for path in sorted(GOLDENS.iterdir()):
        (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
        goldens.setdefault(architecture, []).append(path.name)
    rows = []
    for family in FAMILIES:
        name = family.architecture
        kinds = [*FILES.items(), ("llama", MIXTRAL)]
        files = [key for key, value in kinds if value.architecture == name]
        files = files or [READ_AS[name]]
        tested = goldens[NESTED.get(name, name)]
        rows.append(f"| {name} | yes | {', '.join(files)} | {', '.join(tested)} | yes |\n")
    return BEFORE + "".join(rows) + AFTER


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    new = page()
    old = PAGE.read_text() if PAGE.is_file() else ""
    if sys.argv[1:] != ["--check"]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(new)
    elif new != old:
        sys.exit("docs/models.md is out of date; scripts/lint.sh --fix mends it")

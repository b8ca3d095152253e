"""Trains recipes/byte_lm.yaml under a memory limit that is too small for it, and prints what happened.

The limit is chosen so that the default ladder is really walked: a whole batch does not fit, nor does half or a quarter
of it; one sample alone fits into the first step but, once the optimizer has its moments, only with gradient
checkpointing. It is always a run on the CPU, so that it is the same on every machine.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from adaptive_trainer import AdaptiveTrainer
from adaptive_trainer.progress import log_on_terminal
from adaptive_trainer.report import History, read_history
from adaptive_trainer.report.terminal import console, render

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "byte_lm.yaml"
RUN_DIR = Path("runs/demo")
MEMORY_LIMIT = "19MiB"
STEPS = 200

# Without rich's own @font-face, which would fetch a font when the picture is looked at.
_PICTURE = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> int:
    """Train, print, and say the figures in one line of JSON."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="entries of the recipe, such as steps=50")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw what is printed at the end as an SVG, too")
    arguments = parser.parse_args()
    # One thread: two of them wait for each other whenever the machine has something else to do.
    torch.set_num_threads(1)
    if RUN_DIR.exists():
        print(f"{RUN_DIR} of an earlier demo is replaced", flush=True)
        shutil.rmtree(RUN_DIR)
    print(f"training {RECIPE.name} within {MEMORY_LIMIT} on the CPU", flush=True)
    own = [f"memory_limit={MEMORY_LIMIT}", f"steps={STEPS}", f"run_dir={RUN_DIR}", "device=cpu", "progress=true"]
    with log_on_terminal():
        result = AdaptiveTrainer.from_recipe(RECIPE, [*own, *arguments.overrides]).fit()
    sys.stderr.flush()
    history = read_history(RUN_DIR)
    assert history is not None
    console().print("\n", render(history))
    words = f"loss at the start {result.losses[0]:.3f}, at the end {result.losses[-1]:.3f}"
    print(words)
    if arguments.picture is not None:
        _draw(history, words, arguments.picture)
    summary = {
        "rungs": list(dict.fromkeys(event.rung for event in result.fallbacks)),
        "num_fallbacks": len(result.fallbacks),
        "first_loss": round(result.losses[0], 4),
        "last_loss": round(result.losses[-1], 4),
        "journal": str(RUN_DIR / "journal.jsonl"),
    }
    print(json.dumps(summary))
    return 0


def _draw(history: History, words: str, path: Path) -> None:
    """The command and what it printed at its end, as a picture."""
    paper = Console(record=True, width=170, file=io.StringIO())
    paper.print(Text("$ scripts/demo\n", style="bold"), render(history), Text(f"\n{words}"))
    path.write_text(paper.export_svg(title="adaptive trainer", code_format=_PICTURE), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

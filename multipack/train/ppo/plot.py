"""Draw a PPO run from its metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

_INK, _GREY = "#22303c", "#9aa5b1"
_COLOURS = ("#2f6fb0", "#d9822b", "#3a8f5c", "#8c5fb0", "#c94f5d", "#9aa5b1")
_SHARES = ("generation", "reward", "exchange", "scoring", "train", "wait")
Records = Sequence[dict[str, Any]]


def plot_ppo(metrics_file: Path, picture: Path) -> None:
    """Four panels by iteration: reward, divergence from the reference, losses and clipping, where the time
    goes.

    Args:
        metrics_file: lines as `MetricsLog` writes them.
        picture: PNG file to write; left alone when no iteration was logged.
    """
    lines = [json.loads(line) for line in metrics_file.read_text(encoding="utf-8").splitlines()]
    records = [line for line in lines if line["kind"] == "ppo"]
    if not records:
        return
    figure = Figure(figsize=(11, 7), layout="constrained", facecolor="white")
    axes = figure.subplots(2, 2, sharex=True)
    held_out = [line for line in lines if line["kind"] == "eval"]
    if held_out:
        steps, rewards = [line["step"] for line in held_out], [line["reward"] for line in held_out]
        axes[0, 0].plot(steps, rewards, color=_INK, marker="o", markersize=4, label="held-out")
    _lines(axes[0, 0], records, ["reward"], "mean reward of a response")
    _lines(axes[0, 1], records, ["kl"], "divergence from the reference (nats a response)")
    _lines(
        axes[1, 0],
        records,
        ["value_loss", "clip_share", "explained_variance"],
        "value loss, clipping, critic",
    )
    _time_shares(axes[1, 1], records)
    for axis in axes[1]:
        axis.set_xlabel("iteration", color=_INK)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    seconds = sum(record["seconds"] for record in records)
    samples = sum(record["num_rollouts"] for record in records)
    figure.suptitle(
        f"{records[-1]['step']:,} iterations    {samples:,.0f} samples    {seconds:,.0f} s    "
        f"{samples / seconds:,.1f} samples/s",
        color=_INK,
        fontsize=11,
    )
    figure.savefig(picture, dpi=130)


def _lines(axis: Axes, records: Records, names: Sequence[str], title: str) -> None:
    for name, colour in zip(names, _COLOURS, strict=False):
        known = [record for record in records if record[name] is not None]
        steps, values = [record["step"] for record in known], [record[name] for record in known]
        axis.plot(steps, values, color=colour, linewidth=1.6, label=name.replace("_", " "))
    _dress(axis, title)


def _time_shares(axis: Axes, records: Records) -> None:
    steps = [record["step"] for record in records]
    shares = [[record[f"{name}_share"] or 0.0 for record in records] for name in _SHARES]
    axis.stackplot(steps, shares, labels=_SHARES, colors=_COLOURS, alpha=0.85, linewidth=0)
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    _dress(axis, "share of time")


def _dress(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=10, color=_INK)
    axis.legend(frameon=False, labelcolor=_INK, fontsize=8)
    axis.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.8)
    axis.tick_params(colors=_INK, labelsize=9, length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(_GREY)
    axis.margins(x=0.01)

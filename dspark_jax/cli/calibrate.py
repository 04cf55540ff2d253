"""`dspark-jax calibrate`: fit sequential temperature scaling on recorded blocks and show what it changes."""

from __future__ import annotations

import argparse
import os
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "calibrate",
        help="calibrate a drafter's confidence on recorded blocks",
        description="Fit one temperature for each draft step on recorded (confidence_logits, accepted) pairs.",
    )
    parser.add_argument("records", metavar="RECORDS", help=".npz with confidence_logits and num_accepted")
    parser.add_argument("out", metavar="OUT", help="JSON file, or a checkpoint directory (calibration.json in it)")
    parser.add_argument("--held-out", metavar="RECORDS", help="measure on these records instead of the fitted ones")
    parser.add_argument("--bins", type=int, default=None, help="bins of the calibration error (default: 15)")
    parser.add_argument("--plot", metavar="FILE", help="draw the reliability diagram (png, svg or pdf)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fit, write, and print the error before and after at each step."""
    from dspark_jax.confidence import calibration
    from dspark_jax.confidence.records import load_records

    bins = calibration.BINS if args.bins is None else args.bins
    records = load_records(args.records)
    measured = records if args.held_out is None else load_records(args.held_out)
    if args.plot is not None:
        require_matplotlib()
    fitted = calibration.fit_calibration(
        records.confidence_logits, records.num_accepted, records.num_draft, bins=bins
    )  # fmt: skip
    before, after = calibration.measure(measured, bins=bins), calibration.measure(measured, fitted, bins=bins)
    out = os.path.join(args.out, calibration.FILE_NAME) if os.path.isdir(args.out) else args.out
    fitted.save(out, blocks=len(records.num_accepted), bins=bins, ece=[round(float(x), 6) for x in after.ece])
    if args.plot is not None:
        plot(measured, fitted, args.plot, bins)
    where = args.records if args.held_out is None else f"{args.held_out} (held out)"
    print(f"survival of each draft step, measured on {where}: {len(measured.num_accepted)} blocks")
    print("step  blocks  survival  temperature  ECE before  ECE after  Brier before  Brier after     AUC")
    for step, temperature in enumerate(fitted.temperatures[: len(after.ece)]):
        print(
            f"{step + 1:4d}  {after.count[step]:6d}  {after.survival[step]:8.3f}  {temperature:11.3f}"
            f"  {before.ece[step]:10.4f}  {after.ece[step]:9.4f}"
            f"  {before.brier[step]:12.4f}  {after.brier[step]:11.4f}  {after.auc[step]:6.3f}"
        )
    print(f"mean ECE {mean(before.ece):.4f} before, {mean(after.ece):.4f} after; wrote {out}")
    return 0


def mean(values: Any) -> float:
    """Return the mean of the numbers that are not NaN; NaN without any."""
    known = [float(value) for value in values if value == value]
    return sum(known) / len(known) if known else float("nan")


def require_matplotlib() -> None:
    """Refuse --plot early where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'dspark-jax[plot]' (in a clone: '.[plot]')") from None


def plot(records: Any, fitted: Any, path: str, bins: int) -> None:
    """Draw observed against predicted survival, one panel for each step, before and after."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from dspark_jax.confidence.calibration import reliability

    S = records.confidence_logits.shape[1]
    columns = min(S, 4)
    rows = -(-S // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3 * columns, 3 * rows), squeeze=False, layout="constrained")
    for step, axis in enumerate(axes.flat):
        if step >= S:
            axis.set_axis_off()
            continue
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for name, calibration in (("before", None), ("after", fitted)):
            predicted, observed, share = reliability(records, step, calibration, bins=bins)
            (line,) = axis.plot(predicted, observed, marker=".", linewidth=1, label=name)
            axis.scatter(predicted, observed, s=600 * share, color=line.get_color(), alpha=0.25, linewidths=0)
        axis.set_title(f"step {step + 1}", fontsize=9)
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1)
        axis.set_aspect("equal")
    axes[0, 0].legend(fontsize=8)
    figure.supxlabel("predicted survival")
    figure.supylabel("observed survival")
    figure.savefig(path, dpi=120, metadata={"Software": None} if path.endswith(".png") else None)
    plt.close(figure)

"""What a bigger batch costs and buys on the real engine: step time measured and predicted, tokens/s, bytes a token.

python benchmarks/batch_curve.py [--model smollm2-135m] [--context 512] [--most 16] [--repeats 2] [--json]
"""

from __future__ import annotations

import argparse
import json

from foliolm.cli.explaining.batch_curve import curve_dict, measure
from foliolm.engine.threads import bound_spinning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--most", type=int, default=16, help="largest batch")
    parser.add_argument("--repeats", type=int, default=2, help="rounds; each batch's fastest median counts")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    bound_spinning()
    curve = curve_dict(measure(args.model, args.context, args.most, args.repeats))
    if args.json:
        print(json.dumps(curve))
        return
    for point in curve["points"]:
        print("  ".join(f"{key}={value:.4g}" for key, value in point.items() if value is not None))
    print(f"knee={curve['knee']}  floor_bytes={curve['floor_bytes']:.0f}")


if __name__ == "__main__":
    main()

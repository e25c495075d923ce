"""Measure the statistics of drafts in simulated traffic: the canary test and the drift detector.

    .venv/bin/python benchmarks/draft_statistics.py [--trials 1000] [--days 1000] [--falls 200] [--jobs 2] > tables.md

Prints Markdown tables with date and hardware, ready for benchmarks/reports/draft-statistics-2026-11-25.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
from concurrent.futures import ProcessPoolExecutor

from specdecode_kernels.cpu.native import cpu_name
from specdecode_operator.drafts.crossover import Verdict
from specdecode_simulator.drafts.canary_trials import CanaryResult, run_trials
from specdecode_simulator.drafts.drift_trials import count_false_alarms, requests_until_alarm

SEED = 20261124
CANARY_ROWS = {
    "equal drafts": {"code": 0.0, "prose": 0.0},
    "5 % slower": {"code": -0.05, "prose": -0.05},
    "2 % faster (the least gain)": {"code": 0.02, "prose": 0.02},
    "5 % faster": {"code": 0.05, "prose": 0.05},
    "10 % faster": {"code": 0.1, "prose": 0.1},
    "code 25 % faster, prose 15 % slower": {"code": 0.25, "prose": -0.15},
}
REQUESTS_PER_DAY = (500, 2000, 8000)
FALLS = (0.2, 0.1)


def main() -> None:
    """Run both experiments and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000, help="canary tests a row; 0 for none")
    parser.add_argument("--days", type=int, default=1000, help="stationary days a row")
    parser.add_argument("--falls", type=int, default=200, help="falls of speed a row; 0 for no drift table")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    print(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {hardware()}, seed {SEED}.\n")
    with ProcessPoolExecutor(args.jobs) as pool:
        if args.trials:
            print_canary(pool, args.trials)
        if args.falls:
            print_drift(pool, args.days, args.falls)


def print_canary(pool: ProcessPoolExecutor, trials: int) -> None:
    """Print a row for each candidate: share of verdicts, and requests until them."""
    futures = {name: pool.submit(run_trials, gains, trials, SEED) for name, gains in CANARY_ROWS.items()}
    print(f"Canary test, {trials} trials a row:\n")
    print("| candidate | promoted | rolled back | undecided | median requests to a verdict |\n|---|---|---|---|---|")
    for name, future in futures.items():
        print(canary_row(name, future.result()), flush=True)


def canary_row(name: str, result: CanaryResult) -> str:
    """Return a row of the table of canary tests."""
    shares = (result.share(verdict) for verdict in (Verdict.PROMOTE, Verdict.ROLL_BACK, Verdict.UNDECIDED))
    return " | ".join((f"| {name}", *(f"{100 * share:.1f} %" for share in shares), f"{result.median_requests:.0f} |"))


def print_drift(pool: ProcessPoolExecutor, days: int, trials: int) -> None:
    """Print a row for each rate of requests: false alarms, and requests until a fall of speed is detected."""
    print(f"\nDrift detector, {days} stationary days and {trials} falls a row:\n")
    falls = "".join(f" median requests until a fall of {100 * fall:.0f} % | detected in 5 days |" for fall in FALLS)
    print(f"| requests a day | false alarms | a month |{falls}\n|---|---|---|{'---|---|' * len(FALLS)}")
    for rate in REQUESTS_PER_DAY:
        stationary = pool.submit(count_false_alarms, days, rate, SEED)
        cells = []
        for fall in FALLS:
            seeds = range(SEED, SEED + trials)
            waits = list(pool.map(requests_until_alarm, [fall] * trials, [rate] * trials, seeds, chunksize=16))
            detected = [wait for wait in waits if wait is not None]
            median = statistics.median(detected) if detected else float("nan")
            cells.append(f"{median:.0f} | {100 * len(detected) / trials:.1f} %")
        alarms, _ = stationary.result()
        print(" | ".join((f"| {rate}", str(alarms), f"{30 * alarms / days:.2f}", *cells)) + " |", flush=True)


def hardware() -> str:
    """Return the processor of this machine in words."""
    return f"{os.cpu_count()} virtual cores of {cpu_name()}"


if __name__ == "__main__":
    main()

"""The console command `workbook`."""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module, metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORDED = Path(__file__).parent / "recorded"
MADE_HERE = Path("out/records")
COLUMNS = ["request_throughput", "output_throughput", "median_ttft_ms", "median_tpot_ms"]

PASSED_ON = {
    "doctor": ("helpers.doctor.__main__", "examine this machine"),
    "run": ("helpers.course.execute", "execute notebooks as a reader would"),
}
"""Sub-commands that parse their own arguments: the module with `main(argv)`, and what it does."""


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command. Returns 0, 1 for a failure said in one line, 2 for wrong arguments, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv and argv[0] in PASSED_ON:
            return import_module(PASSED_ON[argv[0]][0]).main(argv[1:])
        args = build_parser().parse_args(argv)
        return args.action(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        print(f"workbook {argv[0]}: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("workbook", description="The inference workbook: check, serve, measure, compare.")
    parser.add_argument("--version", action="version", version=f"workbook {version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, purpose) in PASSED_ON.items():
        commands.add_parser(name, help=purpose)
    for add in (add_plan, add_serve, add_load, add_record, add_records, add_claims):
        add(commands)
    return parser


def version() -> str:
    """The installed version, or that of the pyproject.toml beside a package that is used without installation."""
    try:
        return metadata.version("inference-workbook")
    except metadata.PackageNotFoundError:
        import tomllib

        return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


# plan


def add_plan(commands) -> None:
    parser = commands.add_parser("plan", help="predict where a GPU's memory goes and how fast a model can be on it")
    parser.add_argument(
        "model", help="Qwen2.5-7B, ..., a Hugging Face id of such a model, or a folder with config.json"
    )
    parser.add_argument("--gpu", required=True, help="A100-80GB, H200, L4, ...")
    parser.add_argument("--scheme", default="bf16", help="of the weights: bf16, fp16, fp8, int8, awq (default: bf16)")
    parser.add_argument("--kv-dtype", default="auto", help="of the KV cache: auto or fp8 (default: auto)")
    parser.add_argument("--max-model-len", type=positive, help="tokens of the longest request (default: the model's)")
    parser.add_argument("--max-num-seqs", type=positive, help="requests at once (default: vLLM's for this card)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--tensor-parallel", type=positive, default=1)
    parser.set_defaults(action=plan)


def plan(args) -> int:
    from helpers import capacity
    from helpers.hardware import GIB
    from helpers.models import shape
    from helpers.records import Table

    model = shape(args.model)
    predicted = capacity.memory_plan(
        model,
        args.gpu,
        args.scheme,
        args.kv_dtype,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        tensor_parallel=args.tensor_parallel,
    )
    terms = ("weights", "non_torch", "activation", "cuda_graphs", "kv", "budget")
    print(Table(("GiB on each rank (predicted)", ""), tuple((term, getattr(predicted, term) / GIB) for term in terms)))
    print(predicted.explain())
    parallel = {"tensor_parallel": args.tensor_parallel}
    tpot = capacity.tpot_floor(model, args.gpu, args.scheme, args.kv_dtype, **parallel)
    ttft = capacity.ttft_floor(model, args.gpu, 1024, args.scheme, **parallel)
    print(f"floors, one request: TPOT {tpot * 1000:.2f} ms, TTFT {ttft * 1000:.1f} ms for 1024 tokens")
    return 0 if predicted.fits else 1


# serve and load


def add_serve(commands) -> None:
    parser = commands.add_parser("serve", help="start the tier's vLLM server and print its address; Ctrl-C ends it")
    parser.add_argument("--tier", help="cpu, a100-80, ... (default: detected, or WORKBOOK_TIER)")
    parser.add_argument("--port", type=positive, help="(default: a free one)")
    parser.set_defaults(action=serve)


def serve(args) -> int:
    from helpers import hardware, serving

    tier = hardware.tier(args.tier)
    options = {**tier.serve, "load_format": "dummy"} if tier.speed_only else tier.serve
    with serving.serve(tier.model, port=args.port, **options) as server:
        print(f"{server.model_name} at {server.base_url}/v1 (log: {server.log.path}); Ctrl-C ends it", flush=True)
        while server.running:
            time.sleep(0.2)
    raise RuntimeError(f"the server ended by itself; last lines of its log:\n{server.log.tail(10)}")


def add_load(commands) -> None:
    parser = commands.add_parser("load", help="put an OpenAI-compatible server under load and print what it measured")
    parser.add_argument("base_url", help="http://127.0.0.1:8000")
    parser.add_argument("--tokenizer", required=True, help="folder with the model's tokenizer.json")
    parser.add_argument("--model", help="as the server calls it (default: the first that it serves)")
    loop = parser.add_mutually_exclusive_group(required=True)
    loop.add_argument("--concurrency", type=positive, nargs="+", help="users of a closed loop; several make a curve")
    loop.add_argument("--rate", type=float, nargs="+", help="requests per second of an open loop")
    parser.add_argument("--requests", type=positive, help="a load (default: four a user, or ten seconds of arrivals)")
    parser.add_argument("--input-len", type=positive, default=128)
    parser.add_argument("--output-len", type=positive, default=32)
    parser.add_argument("--driver", choices=["vllm", "locust"], default="vllm")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(action=load)


def load(args) -> int:
    from helpers.load import LoadPlan, stream
    from helpers.records import Table

    lengths = {"input_len": args.input_len, "output_len": args.output_len}
    plans = [
        LoadPlan("closed", args.requests or 4 * users, concurrency=users, seed=args.seed + i, **lengths)
        for i, users in enumerate(args.concurrency or ())
    ] + [
        LoadPlan("open", args.requests or max(1, round(10 * rate)), rate=rate, seed=args.seed + i, **lengths)
        for i, rate in enumerate(args.rate or ())
    ]
    columns = (
        "request_throughput",
        "output_throughput",
        "median_ttft_ms",
        "p99_ttft_ms",
        "median_tpot_ms",
        "p99_tpot_ms",
    )
    rows, failed = [], 0
    for result in stream(
        plans, base_url=args.base_url, tokenizer=args.tokenizer, model_name=args.model, driver=args.driver
    ):
        summary = result.summary()
        rows.append((result.plan.name, result.completed, result.failed, *(summary[name] for name in columns)))
        failed += result.failed
        for reason, count in result.errors.items():
            print(f"{result.plan.name}: {count} failed: {reason}", file=sys.stderr)
    print(Table(("load", "completed", "failed", *columns), tuple(rows)))
    return 1 if failed else 0


# record and records


def add_record(commands) -> None:
    parser = commands.add_parser("record", help="measure the standard set of a tier; a second call measures the rest")
    parser.add_argument("--tier", help="cpu, a100-80, ... (default: detected, or WORKBOOK_TIER)")
    parser.add_argument("--out", type=Path, default=MADE_HERE, help=f"folder of the records (default: {MADE_HERE})")
    parser.add_argument("--only", action="append", default=[], help='closed, open, or a point such as "64 users"')
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument(
        "--plan", action="store_true", help="print the points and the predicted duration, start nothing"
    )
    parser.set_defaults(action=record)


def record(args) -> int:
    from helpers import hardware, record_set, records

    tier, only = hardware.tier(args.tier), tuple(args.only)
    if args.plan:
        print(record_set.describe(tier, record_set.points(tier, args.out, args.repeats, only), args.repeats))
        return 0
    made = record_set.measure(tier, args.out, repeats=args.repeats, only=only, say=lambda line: print(line, flush=True))
    print(records.table(made, [*COLUMNS, "joules_per_token"]))
    print(f"{sum(r.complete for r in made)} of {len(made)} records complete in {args.out.resolve()}")
    return 0 if all(r.complete for r in made) else 1


def add_records(commands) -> None:
    parser = commands.add_parser("records", help="list, show, compare and check recorded runs")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--folder", type=Path, action="append", help=f"(default: the course's records and {MADE_HERE})")

    listing = actions.add_parser("list", parents=[where], help="one line per record")
    listing.add_argument("--tier")
    listing.add_argument("--kind", help="closed or open")
    listing.add_argument("--model")
    listing.add_argument("--metric", action="append", help=f"a column (default: {', '.join(COLUMNS)})")
    listing.set_defaults(action=records_list)

    show = actions.add_parser("show", parents=[where], help="one record: conditions, medians and spreads")
    show.add_argument("id", help="the name that `records list` shows, or a part of it")
    show.set_defaults(action=records_show)

    compare = actions.add_parser("compare", parents=[where], help="two records, metric by metric")
    compare.add_argument("a")
    compare.add_argument("b")
    compare.add_argument("--metric", action="append", help="only this metric")
    compare.set_defaults(action=records_compare)

    check = actions.add_parser("check", parents=[where], help="fail if a file is damaged or a record incomplete")
    check.set_defaults(action=records_check)


def load_records(folders: list[Path] | None):
    """(records, problems) of the folders; the problems are also said on standard error."""
    from helpers import records

    for folder in folders or ():
        if not folder.is_dir():
            raise ValueError(f"no such folder: {folder}")
    found, problems = [], []
    for folder in folders or [RECORDED, MADE_HERE]:
        good, bad = records.load_all(folder)
        found += good
        problems += [f"{folder}/{line}" for line in bad]
    for line in problems:
        print(f"skipped {line}", file=sys.stderr)
    return found, problems


def find_record(found, id: str):
    matches = [record for record in found if record.id == id] or [record for record in found if id in record.id]
    if len(matches) != 1:
        names = ", ".join(record.id for record in matches or found) or "none at all"
        raise ValueError(f"{'several records match' if matches else 'no record matches'} {id!r}: there are {names}")
    return matches[0]


def records_list(args) -> None:
    from helpers import records

    found, _ = load_records(args.folder)
    filters = {name: getattr(args, name) for name in ("tier", "kind", "model") if getattr(args, name)}
    print(records.table(records.select(found, **filters), args.metric or COLUMNS))


def records_show(args) -> None:
    from helpers import records

    record = find_record(load_records(args.folder)[0], args.id)
    for name in (
        "title",
        "tier",
        "kind",
        "model",
        "date",
        "provenance",
        "speed_only",
        "state",
        "seed",
        "warmup",
        "notes",
    ):
        print(f"{name}: {getattr(record, name)}")
    for name in ("machine", "versions", "parameters", "facts"):
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in getattr(record, name).items()))
    for line in record.failures:
        print(f"failed: {line}")
    rows = tuple((metric, record.median(metric), *record.spread(metric)) for metric in record.metrics)
    print(records.Table(("metric", "median", "min", "max", "(max-min)/median"), rows))


def records_compare(args) -> None:
    from helpers import records

    found, _ = load_records(args.folder)
    print(records.compare(find_record(found, args.a), find_record(found, args.b), args.metric))


def records_check(args) -> int:
    found, problems = load_records(args.folder)
    incomplete = [record for record in found if not record.complete]
    for record in incomplete:
        print(f"incomplete {record.id}: {record.state}", file=sys.stderr)
    print(f"{len(found)} records, {len(problems)} damaged files, {len(incomplete)} incomplete")
    return 1 if problems or incomplete else 0


# claims


def add_claims(commands) -> None:
    parser = commands.add_parser("claims", help="list what the articles claim, and what is true")
    parser.add_argument("--verdict", help="true, false, outdated, ...")
    parser.add_argument("--source", help='an article ("A") or its section ("A 4.5")')
    parser.add_argument("--text", help="only claims with this text")
    parser.set_defaults(action=claims_list)


def claims_list(args) -> None:
    from helpers import claims

    if args.verdict and args.verdict not in claims.VERDICTS:
        raise ValueError(f"no verdict {args.verdict!r}; there are {', '.join(claims.VERDICTS)}")
    found = claims.select(claims.load(), verdict=args.verdict, source=args.source, text=args.text)
    for claim in found:
        print(
            f"{claim.id}  {claim.source}  [{claim.verdict}]  {claim.claim}\n    {claim.truth}\n    proof: {claim.proof}"
        )
    print(f"{len(found)} claims")


if __name__ == "__main__":
    sys.exit(main())

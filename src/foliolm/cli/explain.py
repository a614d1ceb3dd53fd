"""``foliolm explain``: where the time went, and what to change."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foliolm.core.errors import ConfigError

if TYPE_CHECKING:
    from foliolm.ledger.reading import LedgerRun
    from foliolm.simulate.advice import Advised
    from foliolm.simulate.grouping import Grouping


def explain(
    folder: Annotated[
        Path | None, typer.Argument(help="What --ledger of a server named.", metavar="LEDGER_DIR", show_default=False)
    ] = None,
    request: Annotated[str | None, typer.Option(help="Only this request: its number, or its label.")] = None,
    engine: Annotated[int | None, typer.Option(help="Which engine; default: the newest run.", min=0)] = None,
    advice: Annotated[bool, typer.Option("--advice/--no-advice", help="Run the arrivals again with changes.")] = True,
    html: Annotated[Path | None, typer.Option(help="Write a report of one self-contained file.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    batch_curve: Annotated[
        bool,
        typer.Option("--batch-curve", help="Run the engine at batches 1, 2, 4, … and show what each doubling buys."),
    ] = False,
    model: Annotated[str, typer.Option(help="With --batch-curve: what to run.")] = "smollm2-135m",
    context: Annotated[int, typer.Option(help="With --batch-curve: tokens of context of each row.", min=1)] = 512,
    most: Annotated[int, typer.Option(help="With --batch-curve: the largest batch.", min=1)] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")] = False,
) -> None:
    """Say where a recorded run's time went, what its steps read, and what a change would do.

    Each change is tried by running the recorded arrivals again through the same scheduler in virtual time.
    Example: foliolm explain ./books --html report.html
    """
    if batch_curve:
        from foliolm.cli.explaining.batch_curve import show

        show(model, context, most, as_json)
        return
    if folder is None:
        raise ConfigError("name a ledger's folder (what serve --ledger wrote), or ask for --batch-curve")
    from foliolm.ledger.explain import explain as work_out

    run = _read(folder, engine)
    if perfetto is not None:
        from foliolm.ledger.perfetto import trace_events

        _write(perfetto, json.dumps({"traceEvents": list(trace_events(run)), "displayTimeUnit": "ms"}))
    if request is not None:
        _show_request(run, request, as_json)
        return
    advised, why_not, grouped = _advise(run) if advice else (None, "not asked for", None)
    said = work_out(run)
    if html is not None:
        from foliolm.cli.explaining.html import report

        _write(html, report(run, said, advised))
    if as_json:
        print(json.dumps(_as_json(run, said.to_dict(), advised, grouped), allow_nan=False))
        return
    from foliolm.cli.explaining.text import print_run

    print_run(run, said, advised, why_not, grouped)


def _read(folder: Path, engine: int | None) -> LedgerRun:
    import gc

    from foliolm.ledger.reading import newest_run

    # Books are hundreds of thousands of records without cycles; collection would look at them again and again.
    gc.disable()
    try:
        return newest_run(folder, engine)
    finally:
        gc.freeze()
        gc.enable()


def _advise(run: LedgerRun) -> tuple[Advised | None, str, Grouping | None]:
    from foliolm.simulate.advice import advise
    from foliolm.simulate.counterfactual import recorded
    from foliolm.simulate.grouping import grouping

    try:
        again = recorded(run)
        return advise(again), "", grouping(again)
    except ConfigError as error:
        return None, str(error), None


def _as_json(run: LedgerRun, said: dict[str, Any], advised: Advised | None, grouped: Grouping | None) -> dict[str, Any]:
    requests = [
        {
            "request_id": record.request_id,
            "label": record.label,
            "prompt_tokens": record.num_prompt_tokens,
            "output_tokens": record.num_output_tokens,
            "finish_reason": str(record.finish_reason),
            "total_ns": run.timelines[record.request_id].total_ns,
            "parts_ns": dict(run.timelines[record.request_id].parts),
            "others_prefill_of_ns": {str(rid): ns for rid, ns in run.timelines[record.request_id].prefill_of},
        }
        for record in run.requests
        if record.request_id in run.timelines
    ]
    changes = None if advised is None else {"tried": advised.tried, "changes": [asdict(one) for one in advised.advice]}
    by_adapter = None if grouped is None else asdict(grouped)
    return {**said, "requests": requests, "advice": changes, "grouping": by_adapter}


def _show_request(run: LedgerRun, wanted: str, as_json: bool) -> None:
    found = [
        record
        for record in run.requests
        if wanted in (str(record.request_id), record.label, record.label.partition(" ")[0])
    ]
    found = [record for record in found if record.request_id in run.timelines]
    if not found:
        raise ConfigError(f"request {wanted!r} did not end in this run; it has {len(run.requests)} that did")
    for record in found:
        if as_json:
            timeline = run.timelines[record.request_id]
            line = {
                "request_id": record.request_id,
                "label": record.label,
                "total_ns": timeline.total_ns,
                "parts_ns": dict(timeline.parts),
                "others_prefill_of_ns": {str(rid): ns for rid, ns in timeline.prefill_of},
            }
            print(json.dumps(line))
        else:
            from foliolm.cli.explaining.text import print_request

            print_request(run, record.request_id)


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    typer.echo(f"written: {path}", err=True)

"""What the commands do with their configuration."""

from dataclasses import replace
from pathlib import Path

from hydra import compose
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from windowquant.errors import UserError
from windowquant.harness import tracking
from windowquant.harness.experiment import from_config as experiment_from
from windowquant.harness.experiment import plan
from windowquant.harness.record import RunRecord
from windowquant.harness.requirements import check
from windowquant.harness.runner import Cell, run
from windowquant.harness.search_quality import measure_search
from windowquant.harness.settings import check_count, from_config
from windowquant.harness.sweep import errors_sentence, in_multirun, leave_pointer
from windowquant.harness.workers import run_cells
from windowquant.report import table
from windowquant.report.paper import paper_rows
from windowquant.report.pareto import pareto_figures


def run_command(cfg: DictConfig) -> None:
    """One run: evaluate or resume, log, print what came out.

    Raises:
        UserError: bad input, or (after the record is written, and not within a multirun) an unreadable video.
    """
    settings = from_config(cfg)
    known = Cell(settings).finished()
    record = known or run(settings)
    if known is None:
        tracking.log([record], settings.wandb, Path(settings.output))
    Console().print(_line(record), highlight=False)
    if in_multirun():
        leave_pointer(settings)
        return
    print(Cell(settings).path)
    complaint = errors_sentence([record])
    if complaint:
        raise UserError(complaint)


def _line(record: RunRecord) -> str:
    low, high = record.ci95
    kl = "" if record.kl is None else f", KL {record.kl:.3g}"
    return (
        f"{record.method} on {record.task} ({record.model}, protocol {record.protocol}): {record.accuracy:.1f} % "
        f"of {record.n} ({low:.1f} to {high:.1f}), strict {record.strict_accuracy:.1f} %{kl}, "
        f"KV {record.kv_bytes:,.0f} bytes ({record.kv_ratio:.2f} times smaller than FP16)"
    )


def table_command(cfg: DictConfig) -> None:
    """One table: plan its cells, run those that are not finished, write and print the table.

    Raises:
        UserError: something it needs is missing (said before anything runs), or a video was unreadable.
    """
    console = table.wide_console()
    check_count("workers", cfg.workers)
    tracking.check_mode(cfg.wandb.mode)
    experiment = experiment_from(cfg)
    paper = paper_rows(experiment.paper) if experiment.paper else []
    planned = plan(experiment, cfg)
    check(cfg.scale, planned, console)
    cells = [Cell(settings) for settings in planned]
    fresh = run_cells(cells, int(cfg.workers), console)
    output = Path(cfg.output)
    tracking.log(fresh, dict(cfg.wandb), output, experiment.name)
    sources = [(record, cell.path) for cell in cells if (record := cell.read()) is not None]
    built = table.build(experiment.title, sources, paper)
    table.write(built, output / "tables", experiment.name)
    table.show(built, console)
    figures = pareto_figures(built.title, built.rows, output / "figures", experiment.name)
    console.print(f"{output / 'tables' / experiment.name}.md, .csv, .json{''.join(f', {path}' for path in figures)}")
    complaint = errors_sentence([record for record, _ in sources])
    if complaint:
        raise UserError(complaint)


def search_command(cfg: DictConfig) -> None:
    """Search quality and cost of a model on its tasks, written to `<output>/<name>.json`."""
    overrides = [f"model={cfg.model}", f"data={cfg.data}", "wandb.mode=disabled"]
    settings = [from_config(compose("run", [*overrides, f"task={task}"])) for task in cfg.tasks]
    settings = [replace(each, limit=cfg.limit, output=cfg.output) for each in settings]
    path = Path(cfg.output) / f"{cfg.name}.json"
    result = measure_search(settings, path)
    table = Table("task", "AUC", "search ms", "prefill ms", title=f"Window search, {result['model']}")
    for row in result["tasks"]:
        found = "-" if row["auc"] is None else f"{row['auc']:.3f}"
        table.add_row(row["task"], found, f"{row['search_ms']:.2f}", f"{row['prefill_ms']:.1f}")
    console = Console()
    console.print(table)
    size = result["search_at_7b_size"]
    console.print(
        f"{size['visual_tokens']} visual tokens of {size['channels']} channels: search {size['search_ms']:.1f} ms"
    )
    console.print(str(path))

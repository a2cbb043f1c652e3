//! Results as a page of Markdown: the table of the aims, then how each load was run.

use std::fmt::{self, Write};

use crate::{
    loads::{Against, Aim, Better},
    results::{LoadResult, Results, Series, Verdict},
};

/// The file's name.
pub const FILE: &str = "table.md";

/// A figure's name for people, and its decimals.
pub(crate) fn label(figure: &str) -> (&str, usize) {
    match figure {
        "tokens_per_s" => ("throughput, tokens/s", 1),
        "decode_tokens_per_s" => ("decode rate, tokens/s", 1),
        "requests_per_s" => ("requests/s", 2),
        "wall_s" => ("wall time, s", 2),
        "ready_ms" => ("from the start to the first text, ms", 0),
        "ttft_p50_ms" => ("TTFT p50, ms", 0),
        "itl_p99_ms" => ("ITL p99, ms", 1),
        "front_cpu_us_per_token" => ("front's CPU per token, µs", 1),
        "cpu_ms_per_token" => ("CPU per token, ms", 3),
        "pss_mib" => ("RAM, MiB", 0),
        "victims_slowdown" => ("victims' ITL p99 / idle ITL", 2),
        "victims_gap_max_s" => ("victims' worst gap, s", 2),
        "readyz_max_ms" => ("/readyz at worst, ms", 1),
        "intruder_ttft_ms" => ("intruder's TTFT, ms", 0),
        "failed" => ("failed requests", 0),
        "stayers_lost" => ("answers lost of those who stay", 0),
        "newcomer_ttft_p50_ms" => ("newcomer's TTFT p50, ms", 0),
        "victims_itl_p99_ms" => ("victims' ITL p99, ms", 1),
        "newcomer_ttft_steps" => ("newcomer's TTFT, steps", 2),
        other => (other, 2),
    }
}

/// What an aim asks for, in words.
pub(crate) fn aim_text(aim: &Aim<String>) -> String {
    let sign = if aim.better == Better::Higher { "≥" } else { "≤" };
    let bound = format!("{:.2}", aim.bound);
    match aim.against {
        Against::PeerDefault => format!("{sign} {bound}x default"),
        Against::PeerBest => format!("{sign} {bound}x best"),
        Against::BatchedBench => format!("{sign} {bound}x batched-bench"),
        Against::Itself => format!("{sign} {bound}"),
    }
}

/// The page.
#[must_use]
pub fn render(results: &Results) -> String {
    let mut page = String::new();
    // Writing to a string cannot fail.
    let _ = write_page(&mut page, results);
    page
}

fn write_page(page: &mut String, results: &Results) -> fmt::Result {
    let conditions = &results.conditions;
    writeln!(page, "# gantry-server and llama-server under the same loads\n")?;
    if conditions.quick {
        writeln!(page, "**A quick run: it shows that the harness works, and nothing about speed.**\n")?;
    }
    writeln!(
        page,
        "- Machine: {}, {} cores, {} GiB, Linux {}",
        conditions.cpu, conditions.cores, conditions.memory_gib, conditions.kernel
    )?;
    writeln!(page, "- Threads of each server: {}", conditions.threads)?;
    writeln!(page, "- Peer: {}", conditions.peer)?;
    if !conditions.cpu_backend.is_empty() {
        writeln!(page, "- Our CPU backend: {}", conditions.cpu_backend)?;
    }
    writeln!(
        page,
        "- Written by `make bench`; what is measured and how to read it: [performance](../../performance.md)\n"
    )?;
    let reading = "Medians over the runs, in brackets the least and the most. Ratios are ours to the peer's, in the";
    writeln!(page, "{reading}\nconfiguration that the aim names; aims without an `x` bound our own figure.\n")?;
    writeln!(page, "| Load | Figure | Aim | Gantry | llama-server, default | llama-server, best | Ratio | |")?;
    writeln!(page, "| --- | --- | --- | --- | --- | --- | --- | --- |")?;
    for load in &results.loads {
        for (index, verdict) in load.verdicts().iter().enumerate() {
            write_row(page, load, verdict, index == 0)?;
        }
    }
    writeln!(page, "\n![Ratios to the peer](ratios.svg)")?;
    write_front(page, results)?;
    for load in &results.loads {
        write_load(page, load)?;
    }
    Ok(())
}

fn write_row(page: &mut String, load: &LoadResult, verdict: &Verdict, first: bool) -> fmt::Result {
    let figure = verdict.aim.figure.as_str();
    let (name, decimals) = label(figure);
    let cell =
        |series: Option<&Series>| series.map_or_else(|| "–".to_owned(), |series| spread(series, figure, decimals));
    let title = if first { load.title.as_str() } else { "" };
    let best = match verdict.aim.against {
        Against::BatchedBench => {
            verdict.peer_best.map_or_else(|| "–".to_owned(), |rate| format!("{rate:.decimals$} (batched-bench)"))
        }
        _ => cell(load.peer_best.as_ref()),
    };
    let ratio = match (verdict.aim.against, verdict.ratio) {
        (Against::Itself, _) | (_, None) => "–".to_owned(),
        (_, Some(ratio)) => format!("{ratio:.2}"),
    };
    let met = if verdict.met { "met" } else { "**missed**" };
    let (ours, default) = (cell(Some(&load.ours)), cell(load.peer_default.as_ref()));
    writeln!(page, "| {title} | {name} | {} | {ours} | {default} | {best} | {ratio} | {met} |", aim_text(&verdict.aim))
}

fn spread(series: &Series, figure: &str, decimals: usize) -> String {
    let (Some(median), Some((least, most))) = (series.figure(figure), series.range(figure)) else {
        return "–".to_owned();
    };
    if series.runs.len() < 2 {
        return format!("{median:.decimals$}");
    }
    format!("{median:.decimals$} ({least:.decimals$}–{most:.decimals$})")
}

/// What the front takes for a token, by protocol.
fn write_front(page: &mut String, results: &Results) -> fmt::Result {
    let loads: Vec<&LoadResult> = results.loads.iter().filter(|load| load.name.starts_with("front")).collect();
    if loads.is_empty() {
        return Ok(());
    }
    let figures = ["front_cpu_us_per_token", "cpu_ms_per_token", "requests_per_s"];
    let names = figures.map(|figure| label(figure).0).join(" | ");
    writeln!(page, "\n| The front by load | {names} | tokens an answer |\n| --- | --- | --- | --- | --- |")?;
    for load in loads {
        let cells = figures.map(|figure| spread(&load.ours, figure, label(figure).1)).join(" | ");
        let (tokens, requests) = (load.ours.figure("tokens"), load.ours.figure("requests"));
        let answer = tokens.zip(requests).map_or_else(|| "–".to_owned(), |(all, of)| format!("{:.1}", all / of));
        writeln!(page, "| `{}`: {} | {cells} | {answer} |", load.name, load.title)?;
    }
    Ok(())
}

fn write_load(page: &mut String, load: &LoadResult) -> fmt::Result {
    writeln!(page, "\n## {}: {}\n", load.name, load.title)?;
    let runs = load.ours.runs.len();
    writeln!(
        page,
        "{}, `{}`, {runs} runs each, {:.0} s in all, ended {}; load average at the start {:.1}.\n",
        load.gantry, load.model, load.took_s, load.ended_at, load.load_average
    )?;
    let default = load.peer_default.as_ref();
    let best = load.peer_best.as_ref().filter(|best| default.is_none_or(|default| default.name != best.name));
    for series in [Some(&load.ours), default, best].into_iter().flatten() {
        write_series(page, series)?;
    }
    if default.is_some() && best.is_none() {
        writeln!(page, "- As it comes the peer is at its best.")?;
    }
    write_trials(page, load)?;
    if has_gaps(load) {
        writeln!(page, "\n![Times between tokens]({})", itl_file(load))?;
    }
    Ok(())
}

/// What each of the peer's configurations did, by all figures that the load has aims for.
fn write_trials(page: &mut String, load: &LoadResult) -> fmt::Result {
    let Some(first) = load.trials.first() else { return Ok(()) };
    let mut figures = vec![first.figure.as_str()];
    for aim in &load.aims {
        let is_new = !figures.contains(&aim.figure.as_str());
        if is_new && load.trials.iter().any(|trial| trial.figures.contains_key(&aim.figure)) {
            figures.push(&aim.figure);
        }
    }
    let names: Vec<&str> = figures.iter().map(|figure| label(figure).0).collect();
    writeln!(page, "\n| Tried once each, the best by the first figure | {} |", names.join(" | "))?;
    writeln!(page, "| --- |{}", " --- |".repeat(names.len()))?;
    for trial in &load.trials {
        let cells = figures.iter().map(|figure| {
            let known = if *figure == trial.figure { trial.value } else { trial.figures.get(*figure).copied() };
            let decimals = label(figure).1;
            known.map_or_else(|| "–".to_owned(), |value| format!("{value:.decimals$}"))
        });
        let cells: Vec<String> = cells.collect();
        let failed = if trial.value.is_none() { " (failed)" } else { "" };
        writeln!(page, "| {}{failed} | {} |", trial.name, cells.join(" | "))?;
    }
    Ok(())
}

/// Whether there are times between tokens to draw.
pub(crate) fn has_gaps(load: &LoadResult) -> bool {
    load.ours.itl_ms.count > 0
}

/// The name of the plot of a load's times between tokens.
pub(crate) fn itl_file(load: &LoadResult) -> String {
    format!("itl-{}.svg", load.name)
}

fn write_series(page: &mut String, series: &Series) -> fmt::Result {
    let Series { name, why, setup, .. } = series;
    let mut command: Vec<String> = setup.env.iter().map(|(key, value)| format!("{key}={value}")).collect();
    command.push(if series.why.is_empty() { "gantry-server" } else { "llama-server" }.to_owned());
    command.extend(setup.args.iter().cloned());
    write!(page, "- {name}: `{}`", command.join(" "))?;
    if !setup.body.is_empty() {
        let body = serde_json::to_string(&setup.body).unwrap_or_default();
        write!(page, " with `{body}` in each request")?;
    }
    if !why.is_empty() {
        write!(page, ": {why}")?;
    }
    writeln!(page)?;
    for error in &series.errors {
        writeln!(page, "  - failed: {error}")?;
    }
    Ok(())
}

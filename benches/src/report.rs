//! The record of a run, and its three forms: text for a terminal, Markdown for docs/benchmarks.md,
//! JSON for machines.
//!
//! Invariant: the load of the machine stands beside the figures in each form, and a disturbed run says
//! so first and last. Written by `main`; a stored record can be printed again.

use std::fmt::Write as _;

use serde::Serialize;

use crate::load::Load;
use crate::stats::Row;

/// Everything that a run found.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Of this record's form.
    pub(crate) version: u32,
    pub(crate) product: String,
    pub(crate) commit: String,
    pub(crate) at: String,
    pub(crate) size: String,
    pub(crate) image: String,
    pub(crate) peers: Vec<String>,
    pub(crate) seconds: f64,
    pub(crate) load: Load,
    pub(crate) skipped: Vec<String>,
    pub(crate) rows: Vec<Row>,
}

fn figure(value: f64) -> String {
    match value {
        v if !v.is_finite() => "-".into(),
        v if v.abs() >= 100.0 => format!("{v:.0}"),
        v if v.abs() >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

fn ratios(row: &Row) -> String {
    let each = row.versus.iter().map(|v| format!("{} × {}", figure(v.ratio), v.peer));
    each.collect::<Vec<_>>().join(", ")
}

fn targets(row: &Row, met: &str, missed: &str) -> String {
    let each = row.targets.iter().map(|t| match t.met {
        Some(true) => format!("{met} {}", t.text),
        Some(false) => format!("{missed} {}", t.text),
        None => t.text.clone(),
    });
    each.collect::<Vec<_>>().join("; ")
}

impl Report {
    fn disturbed(&self) -> Option<String> {
        (!self.load.warnings.is_empty()).then(|| {
            format!(
                "THE MACHINE WAS BUSY, THESE FIGURES SAY LITTLE: {}",
                self.load.warnings.join("; ")
            )
        })
    }

    fn machine(&self) -> String {
        let load = &self.load;
        format!(
            "{} CPUs, Linux {}; load {} before, {} after; busy before {:.0} %, others {:.1} %, steal {:.1} %",
            load.cpus,
            load.kernel,
            load.loadavg_before,
            load.loadavg_after,
            load.busy_before * 100.0,
            load.others * 100.0,
            load.steal * 100.0,
        )
    }

    /// How many targets were missed.
    pub(crate) fn missed(&self) -> usize {
        self.rows.iter().flat_map(|row| &row.targets).filter(|t| t.met == Some(false)).count()
    }

    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "bivouac {} ({}), {} run of {:.0} s, image {}, {}",
            self.product, self.commit, self.size, self.seconds, self.image, self.at
        );
        let _ = writeln!(out, "{}\npeers: {}", self.machine(), self.peers.join("; "));
        if let Some(warning) = self.disturbed() {
            let _ = writeln!(out, "{warning}");
        }
        let wide = self.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
        let mut group = "";
        for row in &self.rows {
            if row.group != group {
                group = row.group;
                let _ = writeln!(
                    out,
                    "\n{group:<wide$} {:>6} {:>9} {:>9} {:>9}",
                    "n", "median", "p90", "p99"
                );
            }
            let pad = wide - row.name.chars().count();
            let _ = write!(
                out,
                "{}{:pad$} {:>6} {:>9} {:>9} {:>9} {:<5}",
                row.name,
                "",
                row.n,
                figure(row.median),
                figure(row.p90),
                figure(row.p99),
                row.unit
            );
            let more =
                [ratios(row), targets(row, "met", "MISSED"), row.note.clone().unwrap_or_default()];
            let more: Vec<String> = more.into_iter().filter(|text| !text.is_empty()).collect();
            let _ = writeln!(out, "  {}", more.join(" | "));
        }
        for sentence in &self.skipped {
            let _ = writeln!(out, "\nnot measured: {sentence}");
        }
        let judged =
            self.rows.iter().flat_map(|row| &row.targets).filter(|t| t.met.is_some()).count();
        let _ = writeln!(out, "\ntargets: {} of {judged} met", judged - self.missed());
        if let Some(warning) = self.disturbed() {
            let _ = writeln!(out, "{warning}");
        }
        out
    }

    pub(crate) fn markdown(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "### {} ({}), {}\n\n{} run of {:.0} s on the image `{}`. {}. Peers: {}.\n",
            self.product,
            self.commit,
            self.at,
            self.size,
            self.seconds,
            self.image,
            self.machine(),
            self.peers.join("; ")
        );
        if let Some(warning) = self.disturbed() {
            let _ = writeln!(out, "**{warning}**\n");
        }
        out.push_str("| what | n | median | p90 | p99 | ratio | target |\n| --- | --- | --- | --- | --- | --- | --- |\n");
        for row in &self.rows {
            let name = row.name.trim_start().replace('|', "\\|");
            let note = row.note.as_ref().map(|note| format!(" ({note})")).unwrap_or_default();
            let _ = writeln!(
                out,
                "| {name}{note} | {} | {} {} | {} | {} | {} | {} |",
                row.n,
                figure(row.median),
                row.unit,
                figure(row.p90),
                figure(row.p99),
                ratios(row),
                targets(row, "met:", "**missed**:")
            );
        }
        for sentence in &self.skipped {
            let _ = writeln!(out, "\nNot measured: {sentence}.");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Samples;

    fn report(met: bool, warnings: Vec<String>) -> Report {
        let samples: Samples = [1.0, 2.0, 3.0].into_iter().collect();
        let peer: Samples = [4.0].into_iter().collect();
        let row = Row::new("launch", "launch", "ms", &samples, true);
        Report {
            version: 1,
            product: "0.1.0".into(),
            commit: "abc".into(),
            at: "today".into(),
            size: "quick".into(),
            image: "host".into(),
            peers: vec!["crun 1".into()],
            seconds: 1.0,
            load: Load {
                cpus: 2,
                kernel: "6.18".into(),
                loadavg_before: "0 0 0".into(),
                loadavg_after: "1 0 0".into(),
                busy_before: 0.0,
                steal: 0.0,
                others: 0.0,
                greedy: vec![],
                warnings,
            },
            skipped: vec![],
            rows: vec![row.versus("bwrap", &peer).want("≤ 4 ms", met)],
        }
    }

    #[test]
    fn a_missed_target_and_a_busy_machine_are_said_loudly() {
        let bad = report(false, vec!["rustc took it".into()]);
        let text = bad.text();
        assert!(text.contains("0.50 × bwrap") && text.contains("MISSED ≤ 4 ms"), "{text}");
        assert_eq!(text.matches("THE MACHINE WAS BUSY").count(), 2, "first and last: {text}");
        assert!(text.contains("targets: 0 of 1 met"), "{text}");
        assert!(bad.markdown().contains("**missed**: ≤ 4 ms"));
        let good = report(true, vec![]);
        assert!(!good.text().contains("BUSY") && good.text().contains("targets: 1 of 1 met"));
    }
}

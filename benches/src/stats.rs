//! Samples and rows: what is printed, recorded and compared with a target.
//!
//! Invariant: a row holds only what was measured in this run; a target without a verdict was not
//! judged. Filled by every group, read by `report`.

use serde::Serialize;

/// Values of one kind, in the order they were measured.
#[derive(Debug, Default, Clone)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// None yet.
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    pub(crate) fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The value that `share` of all others do not pass (nearest rank). NaN for none at all.
    pub(crate) fn at(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (share * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn median(&self) -> f64 {
        self.at(0.5)
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<T: IntoIterator<Item = f64>>(values: T) -> Self {
        Self(values.into_iter().collect())
    }
}

/// What a target says and whether this run reached it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Target {
    pub(crate) text: String,
    /// `None`: too few samples to say.
    pub(crate) met: Option<bool>,
}

/// A ratio to something measured in the same run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Versus {
    pub(crate) peer: String,
    pub(crate) ratio: f64,
}

/// One line of the table.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    pub(crate) group: &'static str,
    pub(crate) name: String,
    pub(crate) unit: &'static str,
    pub(crate) n: usize,
    pub(crate) median: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) versus: Vec<Versus>,
    pub(crate) targets: Vec<Target>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
    /// Whether this run is long enough for verdicts.
    #[serde(skip)]
    judged: bool,
}

impl Row {
    pub(crate) fn new(
        group: &'static str,
        name: impl Into<String>,
        unit: &'static str,
        samples: &Samples,
        judged: bool,
    ) -> Self {
        Self {
            group,
            name: name.into(),
            unit,
            n: samples.len(),
            median: samples.median(),
            p90: samples.at(0.9),
            p99: samples.at(0.99),
            versus: Vec::new(),
            targets: Vec::new(),
            note: None,
            judged,
        }
    }

    /// Adds this row's median divided by the median of a peer.
    #[must_use]
    pub(crate) fn versus(mut self, peer: impl Into<String>, other: &Samples) -> Self {
        if !other.is_empty() {
            self.versus.push(Versus { peer: peer.into(), ratio: self.median / other.median() });
        }
        self
    }

    #[must_use]
    pub(crate) fn want(mut self, text: impl Into<String>, met: bool) -> Self {
        let met = (self.judged && self.median.is_finite()).then_some(met);
        self.targets.push(Target { text: text.into(), met });
        self
    }

    #[must_use]
    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let samples: Samples = (1..=100).rev().map(f64::from).collect();
        assert_eq!((samples.median(), samples.at(0.9), samples.at(0.99)), (50.0, 90.0, 99.0));
        let one: Samples = [7.0].into_iter().collect();
        assert_eq!((one.median(), one.at(0.99)), (7.0, 7.0));
        assert!(Samples::default().median().is_nan());
    }

    #[test]
    fn a_short_run_gives_no_verdict() {
        let samples: Samples = [2.0, 4.0].into_iter().collect();
        let peer: Samples = [4.0].into_iter().collect();
        let row = |judged| Row::new("g", "r", "ms", &samples, judged).want("fast", true);
        assert_eq!(row(true).targets[0].met, Some(true));
        assert_eq!(row(false).targets[0].met, None);
        assert_eq!(row(true).versus("p", &peer).versus[0].ratio, 0.5);
        assert!(row(true).versus("absent", &Samples::default()).versus.is_empty());
    }
}

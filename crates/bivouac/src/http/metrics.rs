//! `/metrics`: what the engine counts and measures, as Prometheus reads it.
//!
//! Owns the names of the series and the times of requests. Invariant: every label has few values (a
//! route is the pattern of a path, never the path), so the number of series is bounded by the API and
//! not by who uses it. Under the API's own address it needs the token like everything else; on an
//! address of `--metrics-listen` it does not.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bivouac_engine::{Clock as _, Meters, SystemClock};
use bivouac_types::meter::{BOUNDS_US, Histogram, Times};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeGaugeValue, NoLabelSet, prometheus_text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use tokio::time::Instant;

use super::App;
use super::error::ApiError;

/// The text format that every Prometheus reads.
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Route of what no path matches.
const NO_ROUTE: &str = "other";

/// How one kind of request came out: method and status.
type Outcome = (&'static str, u16);
/// By route.
type Routes = HashMap<String, HashMap<Outcome, Arc<Histogram>>>;

/// How long requests took until the head of their answer.
#[derive(Debug, Default)]
pub(crate) struct RequestTimes(RwLock<Routes>);

impl RequestTimes {
    fn of(&self, route: &str, outcome: Outcome) -> Arc<Histogram> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(times) = known.get(route).and_then(|outcomes| outcomes.get(&outcome)) {
            return times.clone();
        }
        drop(known);
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        all.entry(route.to_owned()).or_default().entry(outcome).or_default().clone()
    }

    fn observe(&self, route: &str, outcome: Outcome, time: Duration) {
        self.of(route, outcome).observe(time);
    }

    /// All of them, in an order that stays.
    fn read(&self) -> Vec<(String, Outcome, Times)> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let mut out: Vec<_> = all
            .iter()
            .flat_map(|(route, outcomes)| {
                outcomes.iter().map(|(outcome, times)| (route.clone(), *outcome, times.read()))
            })
            .collect();
        out.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
        out
    }
}

/// A method's name; what is no method of ours is one word, so that nobody can make series.
fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "OTHER",
    }
}

/// Measures a request.
pub(crate) async fn observe(State(app): State<App>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = method_name(request.method());
    let begun = Instant::now();
    let response = next.run(request).await;
    let route = route.as_ref().map_or(NO_ROUTE, MatchedPath::as_str);
    app.times.observe(route, (method, response.status().as_u16()), begun.elapsed());
    response
}

/// The page.
pub(crate) async fn serve(State(app): State<App>) -> Response {
    let reading = Reading {
        meters: app.engine.meters().await,
        requests: app.times.read(),
        uptime: SystemClock.now().saturating_sub(app.info.started_at).max(0),
        version: app.info.version.clone(),
    };
    match reading.text() {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "the metrics could not be written");
            let status = axum::http::StatusCode::INTERNAL_SERVER_ERROR;
            ApiError::new(status, "internal_error", "The metrics could not be written.")
                .into_response()
        }
    }
}

/// Everything at one moment.
#[derive(Debug, Clone)]
struct Reading {
    meters: Meters,
    requests: Vec<(String, Outcome, Times)>,
    /// ms.
    uptime: i64,
    version: String,
}

type Labels<'a> = Vec<(&'a str, &'a str)>;

impl Reading {
    fn text(self) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix("bivouac");
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        prometheus_text::encode(&mut text, &registry)?;
        Ok(text)
    }

    fn engine(&self, out: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Always 1; the label tells the version of the engine";
        gauge(out, ("build_info", help, None), [(vec![("version", self.version.as_str())], 1u64)])?;
        let help = "Time since the engine started";
        let uptime = self.uptime as f64 / 1e3;
        gauge(out, ("uptime", help, Some(&Unit::Seconds)), [(vec![], uptime)])
    }

    fn sessions(&self, out: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let meters = &self.meters;
        let help = "Sessions in service, by status";
        let sessions = meters.sessions.iter();
        let sessions = sessions.map(|(status, n)| (vec![("status", status.as_str())], *n));
        gauge(out, ("sessions", help, None), sessions)?;
        let help = "Commands whose end is not recorded yet";
        gauge(out, ("open_commands", help, None), [(vec![], meters.open_commands)])?;
        let help = "Operations of the engine that are in the middle of their steps";
        gauge(out, ("operations_in_progress", help, None), [(vec![], meters.operations)])?;
        if let Some(space) = meters.space {
            let unit = Some(&Unit::Bytes);
            let help = "Bytes of the storage pool that are in use";
            gauge(out, ("pool_used", help, unit), [(vec![], space.used)])?;
            let help = "Bytes of the storage pool that are free";
            gauge(out, ("pool_free", help, unit), [(vec![], space.free)])?;
        }
        Ok(())
    }

    fn operations(&self, out: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counts = &self.meters.counts;
        let help = "Operations that were done since the engine started";
        let done = counts.iter().map(|c| (vec![("operation", c.operation.as_str())], c.done));
        counter(out, "operations", help, done)?;
        let help = "Operations that were refused or failed, by the code of the answer";
        let failed = counts.iter().flat_map(|c| {
            let operation = c.operation.as_str();
            let codes = c.failed.iter();
            codes.map(move |(code, n)| (vec![("operation", operation), ("code", *code)], *n))
        });
        counter(out, "operation_failures", help, failed)
    }

    fn egress(&self, out: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let of = |name: &'static str| {
            let counts = self.meters.egress.iter().filter(move |count| count.name == name);
            counts.map(|count| {
                let labels = count.labels.iter();
                (labels.map(|(k, v)| (k.as_str(), v.as_str())).collect::<Labels<'_>>(), count.total)
            })
        };
        let help = "What egress brokers decided, by what it was about";
        counter(out, "egress_decisions", help, of("decisions"))?;
        let help = "Bytes that sandboxes sent (up) and received (down) through their brokers";
        counter(out, "egress_bytes", help, of("bytes"))?;
        let help = "Flows that a change of a policy cut";
        counter(out, "egress_flows_cut", help, of("cut"))
    }

    fn times(&self, out: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Steps of launches; 'total' is the whole launch as the engine sees it";
        let launches = self.meters.launches.iter();
        let launches = launches.map(|(step, times)| (vec![("step", step.as_str())], times));
        histogram(out, "launch_step_duration", help, launches)?;
        let help = "Work of the database: single reads and writes, and whole transactions";
        let database = self.meters.database.iter();
        let database = database.map(|(kind, times)| (vec![("kind", *kind)], times));
        histogram(out, "database_duration", help, database)?;
        let help = "Requests, until the head of their answer";
        let statuses: Vec<String> =
            self.requests.iter().map(|(_, (_, status), _)| status.to_string()).collect();
        let requests = self.requests.iter().zip(&statuses);
        let requests = requests.map(|((route, (method, _), times), status)| {
            let labels = vec![("method", *method), ("route", route.as_str()), ("status", status)];
            (labels, times)
        });
        histogram(out, "http_request_duration", help, requests)
    }
}

impl Collector for Reading {
    fn encode(&self, mut out: DescriptorEncoder<'_>) -> fmt::Result {
        self.engine(&mut out)?;
        self.sessions(&mut out)?;
        self.operations(&mut out)?;
        self.egress(&mut out)?;
        self.times(&mut out)
    }
}

fn gauge<'a, V: EncodeGaugeValue>(
    out: &mut DescriptorEncoder<'_>,
    (name, help, unit): (&str, &str, Option<&Unit>),
    series: impl IntoIterator<Item = (Labels<'a>, V)>,
) -> fmt::Result {
    let mut metric = out.encode_descriptor(name, help, unit, MetricType::Gauge)?;
    for (labels, value) in series {
        metric.encode_family(&labels)?.encode_gauge(&value)?;
    }
    Ok(())
}

/// The format adds `_total` to the name.
fn counter<'a>(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    series: impl IntoIterator<Item = (Labels<'a>, u64)>,
) -> fmt::Result {
    let mut metric = out.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, value) in series {
        let mut family = metric.encode_family(&labels)?;
        family.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
    }
    Ok(())
}

fn histogram<'a>(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    series: impl IntoIterator<Item = (Labels<'a>, &'a Times)>,
) -> fmt::Result {
    let unit = Some(&Unit::Seconds);
    let mut metric = out.encode_descriptor(name, help, unit, MetricType::Histogram)?;
    for (labels, times) in series {
        let bounds = BOUNDS_US.iter().map(|us| *us as f64 / 1e6);
        let buckets: Vec<(f64, u64)> = bounds.zip(times.buckets).collect();
        let sum = times.sum_us as f64 / 1e6;
        let mut family = metric.encode_family(&labels)?;
        family.encode_histogram::<NoLabelSet>(sum, times.count(), &buckets, None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_can_make_series_by_inventing_methods() {
        assert_eq!(method_name(&Method::GET), "GET");
        assert_eq!(method_name(&Method::from_bytes(b"BREW").unwrap()), "OTHER");
    }

    #[test]
    fn requests_are_kept_apart_by_outcome() {
        let times = RequestTimes::default();
        times.observe("/a", ("GET", 200), Duration::from_millis(1));
        times.observe("/a", ("GET", 200), Duration::from_millis(1));
        times.observe("/a", ("GET", 404), Duration::from_millis(1));
        let read = times.read();
        let counts: Vec<_> = read.iter().map(|(r, o, t)| (r.as_str(), o.1, t.count())).collect();
        assert_eq!(counts, [("/a", 200, 2), ("/a", 404, 1)]);
    }
}

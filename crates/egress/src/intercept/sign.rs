//! AWS requests signed again (Signature Version 4): the guest signs with a dummy, the broker with the
//! real key.
//!
//! Invariant: whatever the guest's signature was is gone, the key itself never leaves, and a body is
//! kept in memory only up to [`MAX_BUFFERED`] and only when the signature cannot do without. Case 117 of
//! reference/egress.md §2. Called by [`super::pipeline`].

use std::sync::Arc;
use std::time::SystemTime;

use aws_credential_types::Credentials;
use aws_sigv4::http_request::{
    PayloadChecksumKind, PercentEncodingMode, SignableBody, SignableRequest, SigningSettings,
    UriPathNormalizationMode,
};
use aws_sigv4::sign::v4::SigningParams;
use bivouac_types::policy::AwsSign;
use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http_body_util::BodyExt;
use hyper::body::Body as _;
use serde::Deserialize;
use tokio::sync::OwnedSemaphorePermit;
use zeroize::Zeroizing;

use super::body::Body;
use super::pipeline::{Out, Visit, no_credential, secret_header, value};
use super::refuse::Refusal;
use super::upstream::failed;
use crate::canonical::Host;
use crate::reason::Reason;

/// Longest body that is read whole because its hash is needed before it is sent.
const MAX_BUFFERED: usize = 16 * 1024 * 1024;
/// Most such bodies at once; others wait.
pub(super) const MOST_BUFFERED: usize = 4;

const SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");
const DATE: HeaderName = HeaderName::from_static("x-amz-date");
const TOKEN: HeaderName = HeaderName::from_static("x-amz-security-token");

/// The vault's text.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Keys {
    access_key_id: Text,
    secret_access_key: Text,
    session_token: Option<Text>,
}

/// A text that is overwritten when it is dropped.
struct Text(Zeroizing<String>);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from).map(|text| Self(Zeroizing::new(text)))
    }
}

/// How the body takes part in the signature.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Payload {
    /// Not at all, or by a hash that the guest has computed: the destination checks it.
    Said(String),
    /// By a hash of ours.
    Read,
}

/// Signs a request and answers its body.
pub(super) async fn sign(
    visit: &Visit,
    rule: &AwsSign,
    given: &HeaderMap,
    out: &mut Out,
    body: Body,
) -> Result<Body, Refusal> {
    if out.target.to_ascii_lowercase().contains("x-amz-signature=") {
        let what = "the request carries its signature in the URL, which cannot be signed again";
        return Err(refused(StatusCode::BAD_REQUEST, what).hint(
            "sign requests with headers; a URL that was signed elsewhere needs a rule-free host",
        ));
    }
    let payload = payload(given)?;
    let value = value(visit, &rule.value).await?;
    out.key.credential.push((rule.value.clone(), value.version));
    let keys: Keys = serde_json::from_str(value.text.expose()).map_err(|_| {
        no_credential("the AWS credential is not JSON with accessKeyId and secretAccessKey")
    })?;
    let (service, region) = scope(rule, &out.key.host, given)?;
    for name in [header::AUTHORIZATION, DATE, TOKEN, header::DATE] {
        out.headers.remove(name);
    }
    let (bytes, body) = match &payload {
        Payload::Said(_) => (Bytes::new(), body),
        Payload::Read => {
            let place = Arc::clone(&visit.context.buffers).acquire_owned().await.ok();
            let bytes = Bytes::from_owner(Whole { bytes: read(body).await?, _place: place });
            (bytes.clone(), Body::full(bytes))
        }
    };
    if service == "s3" && payload == Payload::Read {
        // S3 wants the hash as a header, and the signature over it.
        let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &bytes);
        let text = HeaderValue::from_str(&hex(hash.as_ref())).ok();
        out.headers.insert(SHA256, text.unwrap_or(HeaderValue::from_static("")));
    }
    let signable = match payload {
        Payload::Said(text) => SignableBody::Precomputed(text),
        Payload::Read => SignableBody::Bytes(&bytes),
    };
    apply(&keys, &service, &region, SystemTime::now(), signable, out)?;
    Ok(body)
}

/// A body that is kept whole, in its place until the last of it is sent.
struct Whole {
    bytes: BytesMut,
    _place: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Whole {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads a body, whose frames are let go one by one.
async fn read(mut body: Body) -> Result<BytesMut, Refusal> {
    let said = body.size_hint().exact().unwrap_or_default();
    let too_long = || {
        let what = "the body is too long to be hashed here before it is sent (more than 16 MiB)";
        refused(StatusCode::PAYLOAD_TOO_LARGE, what)
            .hint("send it in parts, or with x-amz-content-sha256: UNSIGNED-PAYLOAD")
            .closing()
    };
    let said = usize::try_from(said).ok().filter(|n| *n <= MAX_BUFFERED).ok_or_else(too_long)?;
    let mut all = BytesMut::with_capacity(said);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Refusal::invalid("the request's body broke off"))?;
        let Ok(data) = frame.into_data() else { continue };
        if all.len() + data.len() > MAX_BUFFERED {
            return Err(too_long());
        }
        all.extend_from_slice(&data);
    }
    Ok(all)
}

/// What the guest said about its body.
fn payload(given: &HeaderMap) -> Result<Payload, Refusal> {
    let mut said = given.get_all(SHA256).iter();
    let Some(first) = said.next() else { return Ok(Payload::Read) };
    let text = first.to_str().unwrap_or_default();
    if said.next().is_some() {
        return Err(Refusal::invalid("there are two x-amz-content-sha256 headers"));
    }
    let hash =
        text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if hash || text == "UNSIGNED-PAYLOAD" || text == "STREAMING-UNSIGNED-PAYLOAD-TRAILER" {
        return Ok(Payload::Said(text.to_owned()));
    }
    if text.starts_with("STREAMING-") {
        let what = "each chunk of the body is signed with the dummy key, which cannot be replaced";
        return Err(refused(StatusCode::BAD_REQUEST, what)
            .hint("turn chunk signing off: payload_signing_enabled=false, or an SDK that sends STREAMING-UNSIGNED-PAYLOAD-TRAILER")
            .closing());
    }
    Err(Refusal::invalid("x-amz-content-sha256 is no hash and no word that is known"))
}

fn refused(status: StatusCode, what: &str) -> Refusal {
    Refusal::new(status, Reason::RuleSign, what)
}

/// Service and region: what the rule says, else the host's name, else the guest's own signature.
fn scope(rule: &AwsSign, host: &Host, given: &HeaderMap) -> Result<(String, String), Refusal> {
    let name = match host {
        Host::Name(name) => name.as_str(),
        Host::Ip(_) => "",
    };
    let found = scope_of_host(name).or_else(|| scope_of_signature(given));
    let (service, region) = found.unzip();
    match (rule.service.clone().or(service), rule.region.clone().or(region)) {
        (Some(service), Some(region)) => Ok((service, region)),
        _ => {
            let what =
                format!("neither the rule nor '{name}' says which AWS service and region it is");
            Err(refused(StatusCode::BAD_REQUEST, &what).hint("set service and region in the rule"))
        }
    }
}

/// What a host name of AWS says.
fn scope_of_host(host: &str) -> Option<(String, String)> {
    let pair = |service: &str, region: &str| Some((service.to_owned(), region.to_owned()));
    if let Some(rest) = host.strip_suffix(".on.aws") {
        let region = rest.rsplit_once(".lambda-url.")?.1;
        return pair("lambda", region);
    }
    let rest =
        host.strip_suffix(".amazonaws.com").or_else(|| host.strip_suffix(".amazonaws.com.cn"))?;
    let labels: Vec<&str> = rest.split('.').collect();
    if let Some(at) = labels.iter().rposition(|l| *l == "s3" || *l == "s3-accelerate") {
        let region = labels[at + 1..].iter().find(|l| is_region(l)).copied();
        return pair("s3", region.unwrap_or("us-east-1"));
    }
    let last = labels.last()?;
    if let Some(region) = last.strip_prefix("s3-") {
        return pair("s3", region);
    }
    let before = labels.len().checked_sub(2).and_then(|n| labels.get(n));
    match before {
        Some(service) if is_region(last) => pair(signing_name(service), last),
        Some(region) if is_region(region) => pair(signing_name(last), region),
        _ => pair(signing_name(last), "us-east-1"),
    }
}

/// Services whose signatures carry another name than their hosts.
fn signing_name(service: &str) -> &str {
    match service {
        "bedrock-runtime" | "bedrock-agent" | "bedrock-agent-runtime" => "bedrock",
        "email" => "ses",
        "queue" => "sqs",
        other => other,
    }
}

fn is_region(label: &str) -> bool {
    let mut parts = label.split('-');
    let area =
        parts.next().is_some_and(|a| a.len() == 2 && a.bytes().all(|b| b.is_ascii_lowercase()));
    area && label.bytes().last().is_some_and(|b| b.is_ascii_digit()) && parts.count() >= 2
}

/// `Credential=KEY/DATE/REGION/SERVICE/aws4_request` of the guest's own signature.
fn scope_of_signature(given: &HeaderMap) -> Option<(String, String)> {
    let text = given.get(header::AUTHORIZATION)?.to_str().ok()?;
    let credential = text.split_once("Credential=")?.1.split([',', ' ']).next()?;
    let mut parts = credential.rsplit('/');
    let ("aws4_request", service, region) = (parts.next()?, parts.next()?, parts.next()?) else {
        return None;
    };
    let plain = |t: &str| {
        !t.is_empty() && t.len() <= 64 && t.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    (plain(service) && plain(region)).then(|| (service.to_owned(), region.to_owned()))
}

/// Computes the signature and puts it into the headers.
fn apply(
    keys: &Keys,
    service: &str,
    region: &str,
    now: SystemTime,
    body: SignableBody<'_>,
    out: &mut Out,
) -> Result<(), Refusal> {
    let broken = |what: &dyn std::fmt::Display| {
        failed(Reason::RuleSign, format!("cannot sign the request: {what}"))
    };
    let mut settings = SigningSettings::default();
    settings.payload_checksum_kind = PayloadChecksumKind::NoHeader;
    if service == "s3" {
        settings.percent_encoding_mode = PercentEncodingMode::Single;
        settings.uri_path_normalization_mode = UriPathNormalizationMode::Disabled;
    }
    let token = keys.session_token.as_ref().map(|t| t.0.to_string());
    let credentials = Credentials::new(
        keys.access_key_id.0.as_str(),
        keys.secret_access_key.0.as_str(),
        token,
        None,
        "bivouac",
    );
    let identity = credentials.into();
    let params = SigningParams::builder()
        .identity(&identity)
        .region(region)
        .name(service)
        .time(now)
        .settings(settings)
        .build()
        .map_err(|e| broken(&e))?;
    let authority = out.authority.to_str().map_err(|e| broken(&e))?;
    let uri = format!("https://{authority}{}", out.target);
    // What nobody changes between here and there, and what AWS demands.
    let mut signed = vec![("host", authority)];
    for (name, value) in &out.headers {
        let text = name.as_str();
        if (text.starts_with("x-amz-") || text == "content-type" || text == "content-md5")
            && let Ok(value) = value.to_str()
        {
            signed.push((text, value));
        }
    }
    let request = SignableRequest::new(out.method.as_str(), uri, signed.into_iter(), body)
        .map_err(|e| broken(&e))?;
    let output = aws_sigv4::http_request::sign(request, &params.into()).map_err(|e| broken(&e))?;
    let (instructions, _) = output.into_parts();
    let (headers, _) = instructions.into_parts();
    for one in headers {
        let name = HeaderName::from_static(one.name());
        let value = secret_header(one.name(), one.value())?;
        if name == header::AUTHORIZATION || name == TOKEN {
            out.secrets.add(&value);
        }
        out.headers.insert(name, value);
    }
    if let Ok(secret) = secret_header("secretAccessKey", &keys.secret_access_key.0) {
        out.secrets.add(&secret);
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    let digit = |n: u8| char::from(b"0123456789abcdef"[usize::from(n & 15)]);
    bytes.iter().flat_map(|b| [digit(b >> 4), digit(*b)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_of_aws_says_its_service_and_region() {
        let of = |host: &str| scope_of_host(host).map(|(s, r)| format!("{s} {r}"));
        for (host, want) in [
            ("s3.amazonaws.com", "s3 us-east-1"),
            ("bucket.s3.amazonaws.com", "s3 us-east-1"),
            ("bucket.with.dots.s3.eu-west-1.amazonaws.com", "s3 eu-west-1"),
            ("b.s3.dualstack.ap-southeast-2.amazonaws.com", "s3 ap-southeast-2"),
            ("s3-us-west-2.amazonaws.com", "s3 us-west-2"),
            ("bucket.s3-accelerate.amazonaws.com", "s3 us-east-1"),
            ("sqs.us-east-2.amazonaws.com", "sqs us-east-2"),
            ("bedrock-runtime.us-west-2.amazonaws.com", "bedrock us-west-2"),
            ("abc.execute-api.eu-central-1.amazonaws.com", "execute-api eu-central-1"),
            ("api.ecr.us-gov-west-1.amazonaws.com", "ecr us-gov-west-1"),
            ("search-x.us-east-1.es.amazonaws.com", "es us-east-1"),
            ("dynamodb.cn-north-1.amazonaws.com.cn", "dynamodb cn-north-1"),
            ("iam.amazonaws.com", "iam us-east-1"),
            ("x.lambda-url.us-east-1.on.aws", "lambda us-east-1"),
        ] {
            assert_eq!(of(host).as_deref(), Some(want), "{host}");
        }
        assert_eq!(of("amazonaws.com.evil.test"), None);
        assert_eq!(of("s3.minio.test"), None);
    }

    #[test]
    fn a_signature_of_the_guest_says_its_scope() {
        let mut headers = HeaderMap::new();
        let text = "AWS4-HMAC-SHA256 Credential=DUMMY/20260101/eu-west-3/s3/aws4_request, SignedHeaders=host, Signature=00";
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static(text));
        assert_eq!(scope_of_signature(&headers), Some(("s3".to_owned(), "eu-west-3".to_owned())));
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static("Bearer x"));
        assert_eq!(scope_of_signature(&headers), None);
    }

    #[test]
    fn chunk_signatures_are_refused_and_hashes_are_believed() {
        let said = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(SHA256, HeaderValue::from_str(text).expect("a header"));
            payload(&headers)
        };
        let hash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(said(hash), Ok(Payload::Said(hash.to_owned())));
        assert!(said("UNSIGNED-PAYLOAD").is_ok());
        assert!(said("STREAMING-UNSIGNED-PAYLOAD-TRAILER").is_ok());
        for bad in
            ["STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"]
        {
            let refusal = said(bad).expect_err(bad);
            assert_eq!((refusal.status.as_u16(), refusal.reason), (400, Reason::RuleSign));
            assert!(refusal.hint.is_some_and(|h| h.contains("chunk signing off")));
        }
        assert!(said("whatever").is_err());
        assert_eq!(payload(&HeaderMap::new()), Ok(Payload::Read));
    }
}

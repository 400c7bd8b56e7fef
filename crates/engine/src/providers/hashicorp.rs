//! HashiCorp Vault (and what speaks like it), KV version 2.
//!
//! Invariant: address and token are the engine's own (`VAULT_ADDR`, `VAULT_TOKEN`, `VAULT_NAMESPACE`); a
//! reference chooses a path below them and nothing else.

use bivouac_types::secret::Secret;
use serde_json::Value;

use super::local::variable;
use super::outcalls::{Call, Outcalls};

/// `MOUNT/PATH#FIELD`.
pub(super) fn parse(text: &str) -> Result<(String, String), String> {
    let wrong = "vault: needs mount, path and field: vault:secret/ci/github#token";
    let (path, field) = text.split_once('#').ok_or(wrong)?;
    let good = |segment: &str| {
        let plain =
            |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.' | b'@' | b'+');
        !segment.is_empty() && segment != "." && segment != ".." && segment.bytes().all(plain)
    };
    let segments: Vec<&str> = path.split('/').collect();
    if segments.len() < 2 || !segments.iter().all(|s| good(s)) || field.is_empty() {
        return Err(wrong.to_owned());
    }
    Ok((path.to_owned(), field.to_owned()))
}

/// Asks the engine's own Vault.
pub(super) async fn read(out: &Outcalls, path: &str, field: &str) -> Result<Secret, String> {
    let (address, token) = (variable("VAULT_ADDR")?, variable("VAULT_TOKEN")?);
    ask(out, &address, token, path, field).await
}

pub(super) async fn ask(
    out: &Outcalls,
    address: &Secret,
    token: Secret,
    path: &str,
    field: &str,
) -> Result<Secret, String> {
    let (mount, rest) = path.split_once('/').ok_or("its path has no mount")?;
    let url = format!("{}/v1/{mount}/data/{rest}", address.expose().trim_end_matches('/'));
    let mut call = Call::get(&url).with("x-vault-token", token);
    if let Ok(namespace) = variable("VAULT_NAMESPACE") {
        call = call.with("x-vault-namespace", namespace);
    }
    let (status, answer) = out.json(call).await?;
    match status {
        200 => {}
        403 => return Err(format!("Vault refuses its token for {path}")),
        404 => return Err(format!("Vault has no {path}")),
        _ => return Err(format!("Vault answered {status} for {path}")),
    }
    match answer.pointer("/data/data").and_then(|data| data.get(field)) {
        Some(Value::String(text)) => Ok(Secret::new(text.clone())),
        Some(Value::Null) | None => Err(format!("{path} in Vault has no field '{field}'")),
        Some(other) => Ok(Secret::new(other.to_string())),
    }
}

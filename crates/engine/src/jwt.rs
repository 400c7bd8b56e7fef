//! RS256 tokens: the key and the signature.
//!
//! Invariant: a private key leaves this module only as a [`Secret`] on its way into the vault; the header
//! says RS256 and nothing in a token is encrypted or left unsigned. Called by `identity` (tokens of ours)
//! and by the provider of GitHub Apps (assertions).

use aws_lc_rs::encoding::AsDer as _;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeyPair, KeySize};
use aws_lc_rs::signature::{KeyPair as _, RSA_PKCS1_SHA256};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bivouac_types::secret::Secret;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::{Value, json};

/// A key that signs.
pub(crate) struct Key(KeyPair);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// A new key of 2048 bits. Takes a good while of CPU time.
    pub(crate) fn generate() -> Result<Self, String> {
        KeyPair::generate(KeySize::Rsa2048).map(Self).map_err(|_| "could not be made".to_owned())
    }

    /// Reads PKCS #1 or PKCS #8 in PEM. The error is a sentence without a subject.
    pub(crate) fn from_pem(text: &Secret) -> Result<Self, String> {
        let wrong = "is no RSA key in PEM (BEGIN RSA PRIVATE KEY or BEGIN PRIVATE KEY)";
        let read = PrivateKeyDer::from_pem_slice(text.expose().as_bytes());
        let pair = match read.map_err(|_| wrong)? {
            PrivateKeyDer::Pkcs1(der) => KeyPair::from_der(der.secret_pkcs1_der()),
            PrivateKeyDer::Pkcs8(der) => KeyPair::from_pkcs8(der.secret_pkcs8_der()),
            _ => return Err(wrong.to_owned()),
        };
        pair.map(Self).map_err(|_| "is damaged, or no RSA key of 2048 bits or more".to_owned())
    }

    /// As the vault keeps it.
    pub(crate) fn to_sealed(&self) -> Result<Secret, String> {
        let der = self.0.as_der().map_err(|_| "could not be written")?;
        Ok(Secret::new(STANDARD.encode(der.as_ref())))
    }

    pub(crate) fn from_sealed(text: &Secret) -> Result<Self, String> {
        let der = STANDARD.decode(text.expose()).map_err(|_| "is damaged")?;
        KeyPair::from_pkcs8(&der).map(Self).map_err(|_| "is damaged".to_owned())
    }

    /// Its public half, as the documents of an issuer show it.
    pub(crate) fn public(&self, id: &str) -> Value {
        let (n, e) = numbers(self.public_bytes()).unwrap_or_default();
        let part = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        json!({
            "kty": "RSA",
            "use": "sig",
            "alg": "RS256",
            "kid": id,
            "n": part(n),
            "e": part(e),
        })
    }

    /// The bytes that name it.
    pub(crate) fn public_bytes(&self) -> &[u8] {
        self.0.public_key().as_ref()
    }

    /// Signs claims.
    pub(crate) fn sign(&self, id: Option<&str>, claims: &Value) -> Result<Secret, String> {
        let mut header = json!({ "alg": "RS256", "typ": "JWT" });
        if let Some(id) = id {
            header["kid"] = id.into();
        }
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let mut token = format!("{}.{}", part(&header), part(claims));
        let mut signature = vec![0; self.0.public_modulus_len()];
        self.0
            .sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), token.as_bytes(), &mut signature)
            .map_err(|_| "the key could not sign")?;
        token.push('.');
        token.push_str(&URL_SAFE_NO_PAD.encode(signature));
        Ok(Secret::new(token))
    }
}

/// Modulus and exponent in the DER of a public key (PKCS #1: a sequence of two whole numbers).
fn numbers(der: &[u8]) -> Option<(&[u8], &[u8])> {
    /// Reads one element with this tag; answers what is in it and what follows.
    fn element(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
        let (head, rest) = der.split_at_checked(2)?;
        let (length, rest) = match head[1] {
            short @ 0..=0x7f => (usize::from(short), rest),
            long => {
                let (bytes, rest) = rest.split_at_checked(usize::from(long & 0x7f))?;
                (bytes.iter().fold(0, |sum, byte| (sum << 8) | usize::from(*byte)), rest)
            }
        };
        if head[0] == tag { rest.split_at_checked(length) } else { None }
    }
    let (inside, _) = element(der, 0x30)?;
    let (n, rest) = element(inside, 2)?;
    let (e, _) = element(rest, 2)?;
    let positive = |number: &'_ [u8]| number.iter().take_while(|byte| **byte == 0).count();
    Some((&n[positive(n)..], &e[positive(e)..]))
}

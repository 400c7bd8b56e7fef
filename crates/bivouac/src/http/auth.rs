//! Who asks: the bearer token.
//!
//! Owns: the comparison. Invariant: everything below `/api`, and `/metrics`, has passed [`require`]; the token is
//! compared in constant time and never logged. The engine's own token makes the principal `local`;
//! so does an unsigned JWT whose `token` claim carries that token, for clients that insist on a JWT
//! (`bivouac env` prints one).

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bivouac_engine::Principal;
use serde::Deserialize;
use subtle::ConstantTimeEq as _;

use super::App;
use super::error::ApiError;

/// Longest header that is looked at: a JWT with our token in it is far shorter.
const MAX_TOKEN: usize = 16 * 1024;

/// Lets a request under `/api` or for `/metrics` through when it carries the token.
pub(crate) async fn require(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if path == "/api" || path == "/metrics" || path.starts_with("/api/") {
        match authenticate(request.headers(), &app.token) {
            Ok(who) => request.extensions_mut().insert(who),
            Err(error) => return error.into_response(),
        };
    }
    next.run(request).await
}

fn authenticate(headers: &HeaderMap, token: &str) -> Result<Principal, ApiError> {
    let refuse = |message: &str| ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message);
    let Some(header) = headers.get(header::AUTHORIZATION) else {
        return Err(refuse(
            "No credentials: send 'Authorization: Bearer <token>'; 'bivouac env' prints the token.",
        ));
    };
    let given = header.to_str().ok().and_then(bearer).filter(|text| text.len() <= MAX_TOKEN);
    if given.is_some_and(|given| is_token(given, token) || carries_token(given, token)) {
        return Ok(Principal::local());
    }
    Err(refuse("The token is not this engine's; 'bivouac env' prints the right one."))
}

fn bearer(header: &str) -> Option<&str> {
    let (scheme, rest) = header.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| rest.trim())
}

fn is_token(given: &str, token: &str) -> bool {
    // An empty configured token would let everybody in.
    !token.is_empty() && bool::from(given.as_bytes().ct_eq(token.as_bytes()))
}

/// An unsigned JWT proves nothing by its form; what counts is that its claim holds the token.
fn carries_token(given: &str, token: &str) -> bool {
    #[derive(Deserialize)]
    struct Header {
        alg: String,
    }
    #[derive(Deserialize)]
    struct Claims {
        token: String,
    }
    let parts: Vec<&str> = given.splitn(4, '.').collect();
    let &[header, claims, _] = parts.as_slice() else { return false };
    let header: Option<Header> = decode(header);
    let claims: Option<Claims> = decode(claims);
    header.is_some_and(|h| h.alg.eq_ignore_ascii_case("none"))
        && claims.is_some_and(|c| is_token(&c.token, token))
}

fn decode<T: serde::de::DeserializeOwned>(part: &str) -> Option<T> {
    let bytes = URL_SAFE_NO_PAD.decode(part.trim_end_matches('=')).ok()?;
    serde_json::from_slice(&bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const TOKEN: &str = "bvk_0123456789abcdef";

    fn verdict(header: &str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, header.parse().unwrap());
        authenticate(&headers, TOKEN).is_ok()
    }

    fn jwt(header: &Value, claims: &Value) -> String {
        let part = |v: &Value| URL_SAFE_NO_PAD.encode(v.to_string());
        format!("Bearer {}.{}.x", part(header), part(claims))
    }

    #[test]
    fn the_token_itself() {
        assert!(verdict(&format!("Bearer {TOKEN}")));
        assert!(verdict(&format!("bearer {TOKEN} ")));
        for bad in [
            "Bearer ".to_owned(),
            "Bearer".to_owned(),
            TOKEN.to_owned(),
            format!("Basic {TOKEN}"),
            format!("Bearer {TOKEN}x"),
            format!("Bearer {}", &TOKEN[1..]),
            format!("Bearer {}", TOKEN.to_uppercase()),
            format!("Bearer {TOKEN}{}", "x".repeat(MAX_TOKEN)),
        ] {
            assert!(!verdict(&bad), "{bad:.40}");
        }
        assert!(authenticate(&HeaderMap::new(), TOKEN).is_err());
    }

    #[test]
    fn an_empty_token_lets_nobody_in() {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, "Bearer ".parse().unwrap());
        assert!(authenticate(&headers, "").is_err());
        let empty = jwt(&json!({"alg": "none"}), &json!({"token": ""}));
        headers.insert(header::AUTHORIZATION, empty.parse().unwrap());
        assert!(authenticate(&headers, "").is_err());
    }

    #[test]
    fn a_jwt_counts_only_by_its_token_claim() {
        let none = json!({"alg": "none", "typ": "JWT"});
        assert!(verdict(&jwt(&none, &json!({"owner_id": "t", "token": TOKEN}))));
        for (header, claims) in [
            (&none, json!({"owner_id": "t"})),
            (&none, json!({"token": "other"})),
            (&none, json!({"token": [TOKEN]})),
            (&none, json!(TOKEN)),
            (&json!({"alg": "RS256"}), json!({"token": TOKEN})),
            (&json!({}), json!({"token": TOKEN})),
        ] {
            assert!(!verdict(&jwt(header, &claims)), "{header} {claims}");
        }
        let good = jwt(&none, &json!({"token": TOKEN}));
        for bad in [format!("{good}.y"), good.replace(".x", ""), "Bearer a.b.c".to_owned()] {
            assert!(!verdict(&bad), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn nothing_else_gets_in(text in "[ -~]{0,60}") {
            proptest::prop_assume!(!text.contains(TOKEN));
            assert!(!verdict(&text));
            assert!(!verdict(&format!("Bearer {text}")));
        }
    }
}

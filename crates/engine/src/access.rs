//! Who asks: the engine's own token and those that were made, for every door.
//!
//! Owns: the comparison, and what is known of each token. Invariants: a secret half is compared by its hash, in
//! constant time, and kept nowhere; what is refused is refused with the same words whatever the reason; nobody
//! hands on a right that he has not, nor for longer; a token that is revoked, or whose maker is, counts no more
//! when the call answers, and whatever waits on [`Engine::ended`] is told. Called by HTTP, SSH and preview.
//!
//! All tokens that count are in memory: one engine has the database, so nothing else changes them, and a flood of
//! invented tokens costs no look at it.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bivouac_store::{Db, StoreError, TokenRow, Unique};
use bivouac_types::Millis;
use bivouac_types::access::{Grant, Reach, Verb};
use bivouac_types::secret::Secret;
use serde::Deserialize;
use tokio::sync::watch;

use crate::Engine;
use crate::api::Principal;
use crate::error::{Error, ErrorKind};
use crate::inner::Inner;
use crate::lifecycle::chain;

/// How a made token begins.
const PREFIX: &str = "bvt_";
/// Bytes of a token's id.
const ID_BYTES: usize = 8;
/// Bytes of a token's secret half.
const SECRET_BYTES: usize = 32;
/// Longest text that is looked at: a JWT with a token in it is far shorter.
const MAX_TEXT: usize = 16 * 1024;
/// How often a use is written down, ms.
const NOTE_MS: Millis = 60_000;
/// How long a token that has ended is still listed, ms.
const KEEP_MS: Millis = 30 * 24 * 3_600_000;
/// Most tokens that count at the same time.
const MAX_TOKENS: usize = 10_000;
/// Most of them that one principal made.
const MAX_OF_ONE: usize = 1_000;
/// Longest name, and longest with the names of its makers before it.
const MAX_NAME: usize = 64;
const MAX_FULL_NAME: usize = 255;
/// Most namespaces of a grant.
const MAX_NAMESPACES: usize = 64;

type Hash = [u8; SHA256_OUTPUT_LEN];

fn hash(text: &str) -> Hash {
    let mut out = [0; SHA256_OUTPUT_LEN];
    out.copy_from_slice(digest(&SHA256, text.as_bytes()).as_ref());
    out
}

fn same(a: &Hash, b: &Hash) -> bool {
    verify_slices_are_equal(a, b).is_ok()
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

fn unhex(text: &str) -> Option<Hash> {
    let mut out = [0; SHA256_OUTPUT_LEN];
    if text.len() != out.len() * 2 || !text.is_ascii() {
        return None;
    }
    for (index, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(index * 2..index * 2 + 2)?, 16).ok()?;
    }
    Some(out)
}

/// A token that counts.
#[derive(Debug)]
struct Known {
    hash: Hash,
    principal: Principal,
    made_by: String,
    expires_at: Option<Millis>,
    /// When its use was last written down.
    noted: AtomicI64,
}

/// Everybody who may ask.
#[derive(Debug)]
pub(crate) struct Access {
    /// Of the engine's own token.
    own: Option<Hash>,
    /// By id, those that are not revoked.
    tokens: RwLock<HashMap<String, Arc<Known>>>,
    /// Grows with each revocation.
    revoked: watch::Sender<u64>,
    /// Held by a change of tokens, so that nothing is made by a token that is being revoked.
    changing: tokio::sync::Mutex<()>,
}

impl Access {
    /// Knows the engine's own token and no other yet. An empty one would let everybody in, and counts as none.
    pub(crate) fn new(own: Option<&Secret>) -> Self {
        let own = own.map(Secret::expose).filter(|text| !text.is_empty()).map(hash);
        Self {
            own,
            tokens: RwLock::default(),
            revoked: watch::Sender::new(0),
            changing: tokio::sync::Mutex::default(),
        }
    }

    fn known(&self, id: &str) -> Option<Arc<Known>> {
        self.tokens.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    fn learn(&self, row: &TokenRow) {
        // What cannot be read lets nobody in.
        let Some(hash) = unhex(&row.hash) else { return };
        let principal = Principal {
            name: row.name.clone(),
            token: Some(row.id.clone()),
            grant: row.grant.clone(),
        };
        let known = Known {
            hash,
            principal,
            made_by: row.made_by.clone(),
            expires_at: row.expires_at,
            noted: AtomicI64::new(row.last_used_at.unwrap_or(Millis::MIN)),
        };
        let mut tokens = self.tokens.write().unwrap_or_else(PoisonError::into_inner);
        tokens.insert(row.id.clone(), Arc::new(known));
    }

    /// The token, if it counts at `now`.
    fn counting(&self, id: &str, now: Millis) -> Option<Arc<Known>> {
        self.known(id).filter(|known| known.expires_at.is_none_or(|at| now < at))
    }

    /// Who shows `text`: the engine's own token or a made one.
    fn recognize(&self, text: &str, now: Millis) -> Option<Recognized> {
        if let Some(halves) = text.strip_prefix(PREFIX)
            && let Some((id, secret)) = halves.split_once('_')
        {
            let given = hash(secret);
            let known = self.counting(id, now);
            // Compared in any case: an id that is known takes no other time than one that is not.
            let wanted = known.as_ref().map_or([0; SHA256_OUTPUT_LEN], |known| known.hash);
            if same(&given, &wanted)
                && let Some(known) = known
            {
                return Some(Recognized::Made(known));
            }
        }
        let own = self.own.as_ref()?;
        same(&hash(text), own).then_some(Recognized::Own)
    }
}

enum Recognized {
    Own,
    Made(Arc<Known>),
}

/// The token in an unsigned JWT's claim. It proves nothing by its form; what counts is that the claim holds one.
fn carried(text: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Header {
        alg: String,
    }
    #[derive(Deserialize)]
    struct Claims {
        token: String,
    }
    fn decode<T: serde::de::DeserializeOwned>(part: &str) -> Option<T> {
        let bytes = URL_SAFE_NO_PAD.decode(part.trim_end_matches('=')).ok()?;
        serde_json::from_slice(&bytes).ok()
    }
    let parts: Vec<&str> = text.splitn(4, '.').collect();
    let &[header, claims, _] = parts.as_slice() else { return None };
    decode::<Header>(header).filter(|header| header.alg.eq_ignore_ascii_case("none"))?;
    decode::<Claims>(claims).map(|claims| claims.token)
}

fn refused() -> Error {
    let message = "The token is not this engine's, or it has expired or was revoked; 'bivouac env' prints the \
                   one that the engine was started with.";
    Error::new(ErrorKind::Unauthorized, "unauthorized", message)
}

/// A token as it is shown: without its secret half.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// Its public half.
    pub id: String,
    /// What it is called: behind the name of the token that made it, if one did.
    pub name: String,
    /// Its rights.
    pub grant: Grant,
    /// Id of the token that made it; absent is the engine's own.
    pub made_by: Option<String>,
    /// When it was made.
    pub created_at: Millis,
    /// From when on it counts no more.
    pub expires_at: Option<Millis>,
    /// When it was taken back.
    pub revoked_at: Option<Millis>,
    /// When it was last shown, to the minute.
    pub last_used_at: Option<Millis>,
}

impl From<TokenRow> for Token {
    fn from(row: TokenRow) -> Self {
        Self {
            id: row.id,
            name: row.name,
            grant: row.grant,
            made_by: Some(row.made_by).filter(|id| !id.is_empty()),
            created_at: row.created_at,
            expires_at: row.expires_at,
            revoked_at: row.revoked_at,
            last_used_at: row.last_used_at,
        }
    }
}

/// A token that is wanted.
#[derive(Debug, Clone)]
pub struct NewToken {
    /// 1 to 64 letters, digits, `.`, `_` and `-`.
    pub name: String,
    /// Its rights.
    pub grant: Grant,
    /// From when on it counts no more; absent is with the one who makes it.
    pub expires_at: Option<Millis>,
}

/// A token that was made.
#[derive(Debug, Clone)]
pub struct MadeToken {
    /// What is known of it.
    pub token: Token,
    /// The whole of it: told once, kept nowhere.
    pub secret: Secret,
}

/// Tokens that were taken back.
#[derive(Debug, Clone)]
pub struct RevokedTokens {
    /// The one that was named, then those that it made.
    pub tokens: Vec<Token>,
    /// How many SSH keys went with them.
    pub ssh_keys: u64,
}

/// Who asks, with what is known of the token that was shown.
#[derive(Debug, Clone)]
pub struct Whoami {
    /// Who.
    pub principal: Principal,
    /// From when on the token counts no more.
    pub expires_at: Option<Millis>,
}

fn check_name(name: &str) -> Result<(), Error> {
    let good = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    let first = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if !first || name.len() > MAX_NAME || !name.bytes().all(good) {
        return Err(Error::invalid(format!(
            "Invalid name: must have 1 to {MAX_NAME} letters, digits, '.', '_' and '-', a letter or digit first"
        )));
    }
    if name == Principal::local().name {
        return Err(Error::invalid("Invalid name: 'local' is the engine's own token"));
    }
    Ok(())
}

fn check_grant(grant: &Grant) -> Result<(), Error> {
    if grant.namespaces.is_empty() || grant.namespaces.len() > MAX_NAMESPACES {
        let message = format!("Invalid namespaces: must name 1 to {MAX_NAMESPACES}");
        return Err(Error::invalid(message));
    }
    if grant.verbs.is_empty() {
        let all = Verb::ALL.map(Verb::as_str).join(", ");
        return Err(Error::invalid(format!("Invalid verbs: must name one or more of {all}")));
    }
    if grant.verbs.contains(&Verb::Admin) && !grant.namespaces.contains(&Reach::Everything) {
        let message = "Invalid verbs: 'admin' goes with every namespace ('*') only";
        return Err(Error::invalid(message));
    }
    Ok(())
}

/// Says what somebody wants to hand on and has not.
fn not_yours(who: &Principal, wanted: &Grant) -> Error {
    let lacks = |verb: &Verb| !who.grant.has(*verb);
    let verbs: Vec<&str> = wanted.verbs.iter().filter(|v| lacks(v)).map(|v| v.as_str()).collect();
    let one = |reach: &Reach| Grant { namespaces: [reach.clone()].into(), verbs: BTreeSet::new() };
    let beyond = wanted.namespaces.iter().filter(|reach| !who.grant.contains(&one(reach)));
    let namespaces: Vec<String> = beyond.map(ToString::to_string).collect();
    let missing = [verbs.join(", "), namespaces.join(", ")];
    let missing: Vec<&str> = missing.iter().map(String::as_str).filter(|t| !t.is_empty()).collect();
    let message =
        format!("The token '{}' cannot hand on what it has not: {}.", who.name, missing.join("; "));
    Error::new(ErrorKind::Forbidden, "forbidden", message)
}

/// The ids of a token and of all that it made, itself or by what it made.
fn with_descendants(rows: &[TokenRow], id: &str) -> Vec<String> {
    let mut found = vec![id.to_owned()];
    let mut at = 0;
    while let Some(maker) = found.get(at).cloned() {
        at += 1;
        for row in rows.iter().filter(|row| row.made_by == maker) {
            if !found.contains(&row.id) {
                found.push(row.id.clone());
            }
        }
    }
    found
}

/// Those of `rows` that somebody may see: all, or its own and what came of it.
fn visible(who: &Principal, rows: Vec<TokenRow>) -> Vec<TokenRow> {
    if who.grant.rules() {
        return rows;
    }
    let Some(own) = &who.token else { return Vec::new() };
    let seen = with_descendants(&rows, own);
    rows.into_iter().filter(|row| seen.contains(&row.id)).collect()
}

impl Inner {
    /// Reads the tokens that count; forgets those that ended long ago.
    pub(crate) async fn load_tokens(&self) -> Result<(), Error> {
        self.db.forget_tokens(self.now().saturating_sub(KEEP_MS)).await?;
        for row in self.db.tokens().await? {
            if row.revoked_at.is_none() {
                self.access.learn(&row);
            }
        }
        Ok(())
    }

    /// Writes down that a token was shown, once a minute at most; nobody waits for it.
    fn note_use(&self, id: &str, known: &Known, now: Millis) {
        let last = known.noted.load(Ordering::Relaxed);
        let due = last <= now.saturating_sub(NOTE_MS);
        let free = due
            && known
                .noted
                .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if !free || self.is_closing() {
            return;
        }
        let (db, id): (Db, String) = (self.db.clone(), id.to_owned());
        self.spawn(async move {
            if let Err(error) = db.note_token_used(&id, now).await {
                tracing::warn!(token = %id, %error, "cannot note the use of a token");
            }
        });
    }

    /// The principal of a token by its id, if it counts at the moment. The empty one is the engine's own.
    pub(crate) fn counting(&self, id: &str) -> Option<Principal> {
        if id.is_empty() {
            return Some(Principal::local());
        }
        self.access.counting(id, self.now()).map(|known| known.principal.clone())
    }

    /// Whether the principal's token still counts.
    fn counts(&self, who: &Principal) -> bool {
        let now = self.now();
        who.token.as_ref().is_none_or(|id| self.access.counting(id, now).is_some())
    }

    async fn make_token(&self, who: &Principal, new: NewToken) -> Result<MadeToken, Error> {
        let _changing = self.access.changing.lock().await;
        if !self.counts(who) {
            return Err(refused());
        }
        let now = self.now();
        let own_end = who.token.as_ref().and_then(|id| self.access.known(id)?.expires_at);
        let expires_at = match (new.expires_at, own_end) {
            (Some(at), _) if at <= now => {
                return Err(Error::invalid("Invalid expiresAt: must be in the future"));
            }
            (Some(at), Some(end)) if at > end => {
                let message = format!(
                    "Invalid expiresAt: the token '{}' ends before that, at {end}; what it makes cannot outlive it",
                    who.name
                );
                return Err(Error::invalid(message));
            }
            (Some(at), _) => Some(at),
            (None, end) => end,
        };
        let name = match &who.token {
            // So no name stands for somebody else's.
            Some(_) => format!("{}/{}", who.name, new.name),
            None => new.name,
        };
        if name.len() > MAX_FULL_NAME {
            let message = format!(
                "Invalid name: with those of its makers it has more than {MAX_FULL_NAME} characters"
            );
            return Err(Error::invalid(message));
        }
        let made_by = who.token.clone().unwrap_or_default();
        self.room_for(&made_by, now)?;
        let (mut id, mut secret) = ([0; ID_BYTES], [0; SECRET_BYTES]);
        getrandom::fill(&mut id)
            .and_then(|()| getrandom::fill(&mut secret))
            .map_err(|_| Error::internal("The host gave no random numbers."))?;
        let (id, secret) = (hex(&id), Secret::new(hex(&secret)));
        let row = TokenRow {
            hash: hex(&hash(secret.expose())),
            id,
            name,
            grant: new.grant,
            made_by,
            created_at: now,
            expires_at,
            revoked_at: None,
            last_used_at: None,
        };
        match self.db.put_token(&row).await {
            Ok(()) => {}
            Err(StoreError::Taken(Unique::TokenName)) => {
                let message = format!(
                    "A token with the name '{}' exists already: choose another name, or take that one back with \
                     'bivouac token revoke'.",
                    row.name
                );
                return Err(Error::new(ErrorKind::Conflict, "conflict", message));
            }
            Err(error) => return Err(error.into()),
        }
        self.access.learn(&row);
        let secret = Secret::new(format!("{PREFIX}{}_{}", row.id, secret.expose()));
        Ok(MadeToken { token: row.into(), secret })
    }

    fn room_for(&self, maker: &str, now: Millis) -> Result<(), Error> {
        let mut tokens = self.access.tokens.write().unwrap_or_else(PoisonError::into_inner);
        tokens.retain(|_, known| known.expires_at.is_none_or(|at| now < at));
        let of_one = tokens.values().filter(|known| known.made_by == maker).count();
        // The engine's own has no limit but the whole's.
        if tokens.len() < MAX_TOKENS && (maker.is_empty() || of_one < MAX_OF_ONE) {
            return Ok(());
        }
        let message =
            "There are too many tokens already: take some back with 'bivouac token revoke'.";
        Err(Error::new(ErrorKind::Conflict, "too_many_tokens", message))
    }

    async fn revoke(&self, who: &Principal, name: &str) -> Result<RevokedTokens, Error> {
        let _changing = self.access.changing.lock().await;
        let all = self.db.tokens().await?;
        let below = format!("{}/{name}", who.name);
        let mut rows = visible(who, all.clone());
        let found = |wanted: &dyn Fn(&TokenRow) -> bool| {
            rows.iter().find(|row| wanted(row)).map(|row| row.id.clone())
        };
        let id = found(&|row| row.revoked_at.is_none() && row.name == name)
            .or_else(|| {
                found(&|row| who.token.is_some() && row.revoked_at.is_none() && row.name == below)
            })
            .or_else(|| found(&|row| row.id == name));
        let Some(id) = id else {
            let shown: String = name.chars().take(MAX_FULL_NAME).collect();
            let message = format!(
                "There is no token '{}'; 'bivouac token ls' lists those that you can take back.",
                shown.escape_debug()
            );
            return Err(Error::not_found(message));
        };
        let ended = with_descendants(&all, &id);
        let ids: BTreeSet<String> = ended.iter().cloned().collect();
        let now = self.now();
        let ssh_keys = self.db.revoke_tokens(&ids, now).await?;
        {
            let mut tokens = self.access.tokens.write().unwrap_or_else(PoisonError::into_inner);
            tokens.retain(|id, _| !ids.contains(id));
        }
        self.access.revoked.send_modify(|count| *count += 1);
        rows = all;
        rows.retain(|row| ids.contains(&row.id));
        rows.sort_by_key(|row| ended.iter().position(|id| *id == row.id));
        let now_revoked = |row: TokenRow| Token {
            revoked_at: Some(row.revoked_at.unwrap_or(now)),
            ..Token::from(row)
        };
        Ok(RevokedTokens { tokens: rows.into_iter().map(now_revoked).collect(), ssh_keys })
    }
}

impl Engine {
    /// Who shows this token: the engine's own, one that was made, or an unsigned JWT whose `token` claim carries
    /// either.
    ///
    /// # Errors
    /// 401, with the same words for a token that is unknown, has expired or was revoked.
    pub fn authenticate(&self, token: &str) -> Result<Principal, Error> {
        let (inner, now) = (&self.inner, self.inner.now());
        if token.is_empty() || token.len() > MAX_TEXT {
            return Err(refused());
        }
        let found = inner.access.recognize(token, now).or_else(|| {
            let carried = carried(token)?;
            inner.access.recognize(&carried, now)
        });
        match found {
            None => Err(refused()),
            Some(Recognized::Own) => Ok(Principal::local()),
            Some(Recognized::Made(known)) => {
                let principal = known.principal.clone();
                if let Some(id) = &principal.token {
                    inner.note_use(id, &known, now);
                }
                Ok(principal)
            }
        }
    }

    /// The principal of a token by its id, for doors that know it by something else than the token itself (an SSH
    /// key, a cookie). `None` and the empty text are the engine's own.
    ///
    /// # Errors
    /// 401 when it counts no more.
    pub fn principal_of(&self, token_id: Option<&str>) -> Result<Principal, Error> {
        let Some(id) = token_id.filter(|id| !id.is_empty()) else { return Ok(Principal::local()) };
        let now = self.inner.now();
        let known = self.inner.access.counting(id, now).ok_or_else(refused)?;
        self.inner.note_use(id, &known, now);
        Ok(known.principal.clone())
    }

    /// Grows with each revocation: whoever keeps something open asks [`Engine::counts`] then.
    #[must_use]
    pub fn revoked(&self) -> watch::Receiver<u64> {
        self.inner.access.revoked.subscribe()
    }

    /// Whether the principal's token still counts: it was not revoked and has not expired.
    #[must_use]
    pub fn counts(&self, who: &Principal) -> bool {
        self.inner.counts(who)
    }

    /// Answers when the principal's token counts no more: whatever is open in its name is then to be cut. Never for
    /// the engine's own.
    pub fn ended(&self, who: &Principal) -> impl Future<Output = ()> + Send + 'static {
        let (inner, token) = (Arc::clone(&self.inner), who.token.clone());
        async move {
            let Some(id) = token else { return std::future::pending().await };
            let mut revoked = inner.access.revoked.subscribe();
            while let Some(known) = inner.access.counting(&id, inner.now()) {
                let late = async {
                    match known.expires_at {
                        Some(at) => inner.clock.sleep_until(at).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    changed = revoked.changed() => if changed.is_err() { return },
                    () = late => {}
                }
            }
        }
    }

    /// Makes a token. Its secret half is in the answer and nowhere else.
    ///
    /// # Errors
    /// 400 for a bad name, grant or expiry; 403 for a right that the caller has not; 409 for a name that is taken.
    pub async fn create_token(&self, who: &Principal, new: NewToken) -> Result<MadeToken, Error> {
        self.inner.check_open()?;
        check_name(&new.name)?;
        check_grant(&new.grant)?;
        if !who.grant.contains(&new.grant) {
            return Err(not_yours(who, &new.grant));
        }
        let (inner, who) = (Arc::clone(&self.inner), who.clone());
        let work = async move {
            let made = inner.make_token(&who, new).await?;
            tracing::info!(by = %who.name, token = %made.token.id, name = %made.token.name, "token made");
            Ok(made)
        };
        self.inner.run(work).await
    }

    /// Tokens, the oldest first: all of them for an administrator, else the caller's own and what came of it. Those
    /// that ended within the last 30 days are among them.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn tokens(&self, who: &Principal) -> Result<Vec<Token>, Error> {
        let rows = visible(who, self.inner.db.tokens().await?);
        Ok(rows.into_iter().map(Token::from).collect())
    }

    /// Takes a token back, by its name or id, with all tokens that it made and their SSH keys. What is open in
    /// their names is cut.
    ///
    /// # Errors
    /// 404 for one that is not there, or that the caller cannot see.
    pub async fn revoke_token(&self, who: &Principal, name: &str) -> Result<RevokedTokens, Error> {
        self.inner.check_open()?;
        let (inner, who, name) = (Arc::clone(&self.inner), who.clone(), name.to_owned());
        let work = async move {
            let gone = inner.revoke(&who, &name).await;
            match &gone {
                Ok(gone) => {
                    let count = gone.tokens.len();
                    tracing::info!(by = %who.name, %name, count, "tokens revoked");
                }
                Err(error) if error.kind != ErrorKind::NotFound => {
                    tracing::error!(%name, cause = %chain(error), "cannot revoke a token");
                }
                Err(_) => {}
            }
            gone
        };
        self.inner.run(work).await
    }

    /// Who asks.
    #[must_use]
    pub fn whoami(&self, who: &Principal) -> Whoami {
        let expires_at = who.token.as_ref().and_then(|id| self.inner.access.known(id)?.expires_at);
        Whoami { principal: who.clone(), expires_at }
    }
}

#[cfg(test)]
#[path = "access/tests.rs"]
mod tests;

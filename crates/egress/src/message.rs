//! What serve and the broker of a session say to each other. JSON, inside frames that the runtime
//! carries without looking at them.
//!
//! Invariant: secrets travel only here, only towards the broker, and only over the socket between
//! serve and shim; `Debug` shows none.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use bivouac_types::id::{SessionId, ValueId};
use bivouac_types::policy::{Cidr, NetworkPolicy};
use bivouac_types::secret::Secret;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What a broker starts with: part of the launch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Who it works for.
    pub identity: Identity,
    /// Name servers to ask, in this order.
    pub resolvers: Vec<SocketAddr>,
    /// Ranges that policies may allow although they are private: `--egress-allow-private`.
    #[serde(default)]
    pub allow_private: Vec<Cidr>,
    /// File of root certificates (PEM) that upstream TLS is checked against, opened before the shim is
    /// confined: the host's store and `--extra-ca`.
    pub roots: String,
    /// PEM of `--extra-ca`: goes into the sandbox's bundle too.
    #[serde(default)]
    pub extra_ca: String,
    /// The policy to begin with.
    pub policy: PolicySet,
}

/// Names of a session, for tokens and lines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Team, as an id.
    pub team: String,
    /// Project, as an id.
    pub project: String,
    /// The sandbox's name.
    pub sandbox: String,
    /// The session.
    pub session: SessionId,
}

/// A policy and the values that it needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PolicySet {
    /// Grows with each change of a session's policy; a set that is not newer is ignored.
    pub generation: u64,
    /// The policy.
    pub policy: NetworkPolicy,
    /// Resolved header values. What is missing is asked for when it is needed
    /// ([`FromBroker::WantValue`]).
    #[serde(default)]
    pub values: BTreeMap<ValueId, Value>,
}

/// A resolved value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// The text that goes into the header.
    #[serde(serialize_with = "show", deserialize_with = "hide")]
    pub text: Secret,
    /// Changes when the secret does: part of the key of upstream connections.
    pub version: u64,
    /// From when on it has to be asked for again, ms since the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<u64>,
}

fn show<S: Serializer>(secret: &Secret, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(secret.expose())
}

fn hide<'de, D: Deserializer<'de>>(from: D) -> Result<Secret, D::Error> {
    String::deserialize(from).map(Secret::new)
}

/// serve → broker; each is answered with a [`Reply`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToBroker {
    /// Replace the policy: compile, swap, cut what it forbids, then answer.
    Policy(PolicySet),
    /// New values for ids that are in use: a rotated secret, a fresh token, or the answer to
    /// [`FromBroker::WantValue`].
    Values {
        /// By id. `Err` says why it cannot be had; that sentence holds no secret.
        values: BTreeMap<ValueId, Result<Value, String>>,
    },
    /// The answer to [`FromBroker::WantToken`].
    Token {
        /// For whom.
        audience: String,
        /// The signed token and its end, ms since the epoch; or why there is none.
        token: Result<Value, String>,
    },
    /// What would happen to a request? Nothing is sent.
    Explain {
        /// The URL.
        url: String,
        /// The method.
        method: String,
    },
}

/// broker → serve, unasked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromBroker {
    /// A request waits for this value.
    WantValue {
        /// Which.
        value: ValueId,
    },
    /// A request waits for an identity token.
    WantToken {
        /// `aud` of the token: origin and path of the forward URL, without a slash at the end.
        audience: String,
    },
    /// Counters since the last such message, by name and labels; at most one a second.
    Counted {
        /// `decisions{kind,verdict,reason}`, `bytes{direction}`, `flows`: see [`Count`].
        counts: Vec<Count>,
    },
}

/// One counter.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Count {
    /// `decisions` or `bytes`.
    pub name: String,
    /// Labels, in order.
    pub labels: Vec<(String, String)>,
    /// How much was added.
    pub added: u64,
}

/// broker → serve, in answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Reply {
    /// It is done.
    Done {
        /// Flows that were cut.
        #[serde(default)]
        cut: u64,
    },
    /// It was refused and nothing changed: a sentence for the user.
    Refused {
        /// Path of the field in the policy, when it is about one.
        field: Option<String>,
        /// Why.
        message: String,
    },
    /// Answer to [`ToBroker::Explain`].
    Explained(Explained),
}

/// What would happen to a request, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Explained {
    /// Whether it would leave.
    pub allowed: bool,
    /// The word for it.
    pub reason: crate::reason::Reason,
    /// Entry of the policy that decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<String>,
    /// Rule of that entry, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<usize>,
    /// What is done to it, in words: "passes unseen", "sets authorization (credential github)".
    pub handling: String,
    /// A change of the policy that would allow it, as a command line's arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

//! The egress policy as clients send it and as they read it back. Wire format:
//! reference/vercel-api.md §2.10. Meaning: reference/egress.md §1.
//!
//! Invariant: a value of a `transform` header is never kept in a [`NetworkPolicy`] that is stored
//! or shown; only its name is.

use serde::{Deserialize, Serialize};

/// A sandbox's egress policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(tag = "mode", rename_all = "kebab-case")]
pub enum NetworkPolicy {
    /// Everything that is not denied above all policies.
    #[default]
    AllowAll,
    /// Nothing, DNS included.
    DenyAll,
}

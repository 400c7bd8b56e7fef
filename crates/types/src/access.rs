//! Who may do what: the scopes of a principal.
//!
//! Invariant: what is not granted is refused; a namespace that a principal has no right in does not exist for
//! it. Checked by the engine at every call.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::name::{Invalid, Namespace, check_scope};

/// What may be done. Each stands alone, but for [`Verb::Admin`], which has all the others in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    /// Look: lists, records, logs, files of sandboxes, snapshots, drives.
    Read,
    /// Work inside: commands, terminals, SSH, files, ports.
    Exec,
    /// Reach the ports of sandboxes through their routes.
    Preview,
    /// Make, change, stop and remove sandboxes, snapshots and drives.
    Write,
    /// Change policies, secrets and credentials.
    Policy,
    /// Everything, and what belongs to the engine: tokens, images, storage. Only of use for every namespace.
    Admin,
}

impl Verb {
    /// Every verb.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Exec, Self::Preview, Self::Write, Self::Policy, Self::Admin];

    /// Its word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Exec => "exec",
            Self::Preview => "preview",
            Self::Write => "write",
            Self::Policy => "policy",
            Self::Admin => "admin",
        }
    }

    /// Reads its word.
    ///
    /// # Errors
    /// [`Invalid`] that lists them all.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        Self::ALL.into_iter().find(|verb| verb.as_str() == text).ok_or_else(|| {
            let all: Vec<&str> = Self::ALL.iter().map(|verb| verb.as_str()).collect();
            Invalid::new("verbs", format!("must be of {}, got '{text}'", all.join(", ")))
        })
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Which namespaces a principal has rights in.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Reach {
    /// `*`.
    Everything,
    /// `TEAM/*`.
    Team(String),
    /// `TEAM/PROJECT`.
    Project(Namespace),
}

impl Reach {
    /// Reads `*`, `TEAM/*` or `TEAM/PROJECT`.
    ///
    /// # Errors
    /// [`Invalid`].
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        if text == "*" {
            return Ok(Self::Everything);
        }
        let bad = || {
            Invalid::new("namespaces", format!("must be TEAM/PROJECT, TEAM/* or *, got '{text}'"))
        };
        let (team, project) = text.split_once('/').ok_or_else(bad)?;
        check_scope("namespaces", team)?;
        if project == "*" {
            return Ok(Self::Team(team.to_owned()));
        }
        check_scope("namespaces", project)?;
        Ok(Self::Project(Namespace { team: team.to_owned(), project: project.to_owned() }))
    }

    /// Whether that namespace is in it.
    #[must_use]
    pub fn covers(&self, ns: &Namespace) -> bool {
        match self {
            Self::Everything => true,
            Self::Team(team) => *team == ns.team,
            Self::Project(own) => own == ns,
        }
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Everything => f.write_str("*"),
            Self::Team(team) => write!(f, "{team}/*"),
            Self::Project(ns) => write!(f, "{}/{}", ns.team, ns.project),
        }
    }
}

impl TryFrom<String> for Reach {
    type Error = Invalid;
    fn try_from(text: String) -> Result<Self, Invalid> {
        Self::parse(&text)
    }
}

impl From<Reach> for String {
    fn from(reach: Reach) -> Self {
        reach.to_string()
    }
}

/// The rights of a principal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Where.
    pub namespaces: BTreeSet<Reach>,
    /// What.
    pub verbs: BTreeSet<Verb>,
}

impl Grant {
    /// Everything everywhere: the holder of the engine's own token.
    #[must_use]
    pub fn all() -> Self {
        Self { namespaces: [Reach::Everything].into(), verbs: [Verb::Admin].into() }
    }

    /// Whether it has any right in that namespace. To one who has none, nothing of it is there.
    #[must_use]
    pub fn sees(&self, ns: &Namespace) -> bool {
        self.namespaces.iter().any(|reach| reach.covers(ns))
    }

    /// Whether it may do what concerns the engine as a whole.
    #[must_use]
    pub fn rules(&self) -> bool {
        self.verbs.contains(&Verb::Admin) && self.namespaces.contains(&Reach::Everything)
    }

    /// The namespace that is meant when somebody names none, or only a team: the first one that it has rights in.
    #[must_use]
    pub fn home(&self, team: Option<&str>) -> Namespace {
        const DEFAULT: &str = "local";
        let in_team = |of: &str| team.is_none_or(|team| team == of);
        let first = self.namespaces.iter().find_map(|reach| match reach {
            Reach::Project(ns) if in_team(&ns.team) => Some(ns.clone()),
            _ => None,
        });
        let whole = || {
            self.namespaces.iter().find_map(|reach| match reach {
                Reach::Everything => Some(team.unwrap_or(DEFAULT).to_owned()),
                Reach::Team(of) if in_team(of) => Some(of.clone()),
                _ => None,
            })
        };
        let wide = self.namespaces.contains(&Reach::Everything);
        first.filter(|_| !wide).unwrap_or_else(|| Namespace {
            team: whole().or(team.map(str::to_owned)).unwrap_or_else(|| DEFAULT.to_owned()),
            project: DEFAULT.to_owned(),
        })
    }

    /// Whether it may do that in a namespace that it sees.
    #[must_use]
    pub fn has(&self, verb: Verb) -> bool {
        self.verbs.contains(&verb) || self.verbs.contains(&Verb::Admin)
    }

    /// Whether it has every right of `other`: nobody hands on what it has not.
    #[must_use]
    pub fn contains(&self, other: &Self) -> bool {
        let covered = |wanted: &Reach| {
            self.namespaces.iter().any(|own| match (own, wanted) {
                (Reach::Everything, _) => true,
                (Reach::Team(team), Reach::Team(other)) => team == other,
                (own, Reach::Project(ns)) => own.covers(ns),
                _ => false,
            })
        };
        other.namespaces.iter().all(covered) && other.verbs.iter().all(|verb| self.has(*verb))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ns(text: &str) -> Namespace {
        let (team, project) = text.split_once('/').unwrap();
        Namespace { team: team.to_owned(), project: project.to_owned() }
    }

    fn grant(namespaces: &[&str], verbs: &[Verb]) -> Grant {
        Grant {
            namespaces: namespaces.iter().map(|text| Reach::parse(text).unwrap()).collect(),
            verbs: verbs.iter().copied().collect(),
        }
    }

    #[test]
    fn reaches_read_back() {
        for text in ["*", "a/*", "a/b"] {
            assert_eq!(Reach::parse(text).unwrap().to_string(), text);
        }
        for bad in ["", "a", "*/a", "*/*", "a/", "/b", "a/b/c", "a b/c"] {
            assert!(Reach::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_grant_ends_at_its_namespaces_and_verbs() {
        let one = grant(&["a/b"], &[Verb::Read]);
        assert!(one.sees(&ns("a/b")) && !one.sees(&ns("a/c")) && !one.sees(&ns("b/b")));
        assert!(one.has(Verb::Read) && !one.has(Verb::Exec));
        let team = grant(&["a/*"], &[Verb::Read, Verb::Exec]);
        assert!(team.contains(&one) && !one.contains(&team));
        assert!(Grant::all().contains(&team) && !team.contains(&Grant::all()));
        let other = grant(&["b/*"], &[Verb::Read]);
        assert!(!team.contains(&other));
    }

    #[test]
    fn only_an_administrator_of_everything_rules() {
        assert!(Grant::all().rules());
        assert!(!grant(&["a/*"], &[Verb::Admin]).rules());
        assert!(!grant(&["*"], &[Verb::Read, Verb::Write, Verb::Policy, Verb::Exec]).rules());
    }

    #[test]
    fn who_names_no_namespace_means_the_first() {
        let home = |of: &[&str], team| {
            let Namespace { team, project } = grant(of, &[Verb::Read]).home(team);
            format!("{team}/{project}")
        };
        assert_eq!(home(&["*"], None), "local/local");
        assert_eq!(home(&["*"], Some("a")), "a/local");
        assert_eq!(home(&["*", "a/b"], None), "local/local");
        assert_eq!(home(&["b/c", "a/b"], None), "a/b");
        assert_eq!(home(&["b/c", "a/b"], Some("b")), "b/c");
        assert_eq!(home(&["a/*", "b/c"], None), "b/c");
        assert_eq!(home(&["a/*"], None), "a/local");
        assert_eq!(home(&["a/b"], Some("x")), "x/local");
    }
}

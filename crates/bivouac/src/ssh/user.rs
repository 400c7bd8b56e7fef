//! The name that an SSH client logs in with: which sandbox, and as whom inside.
//!
//! Pure. Called by `handler`.

use bivouac_types::name::{Namespace, check_sandbox_name, check_scope};

/// Before the sandbox's name: as root inside.
const AS_ROOT: &str = "root+";

/// What a user name on the engine's own SSH port says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Login {
    /// The sandbox.
    pub(crate) sandbox: String,
    /// Where it is, if the name says that.
    pub(crate) namespace: Option<Namespace>,
    /// As root inside.
    pub(crate) root: bool,
}

/// Reads `[root+]NAME[.PROJECT.TEAM]`.
pub(crate) fn read(user: &str) -> Option<Login> {
    let (root, rest) = match user.strip_prefix(AS_ROOT) {
        Some(rest) => (true, rest),
        None => (false, user),
    };
    let (sandbox, namespace) = place(rest)?;
    Some(Login { sandbox, namespace, root })
}

/// Reads `NAME[.PROJECT.TEAM]`. A sandbox's name has no dot; of the rest, the last two parts count when a team has
/// none either.
pub(crate) fn place(text: &str) -> Option<(String, Option<Namespace>)> {
    let (sandbox, rest) = match text.split_once('.') {
        Some((sandbox, rest)) => (sandbox, Some(rest)),
        None => (text, None),
    };
    check_sandbox_name(sandbox).ok()?;
    let namespace = match rest {
        None => None,
        Some(rest) => {
            let (project, team) = rest.split_once('.')?;
            check_scope("project", project).ok()?;
            check_scope("team", team).ok()?;
            Some(Namespace { team: team.to_owned(), project: project.to_owned() })
        }
    };
    Some((sandbox.to_owned(), namespace))
}

/// Whether the user of a connection whose sandbox is known already is root inside. Every other name is the default
/// user: clients send the name that somebody has on his own machine when nothing is told.
pub(crate) fn is_root(user: &str) -> bool {
    user == "root"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_where_and_as_whom() {
        let login = |text: &str| {
            let Login { sandbox, namespace, root } = read(text)?;
            let place = namespace.map(|ns| format!("{}/{}", ns.team, ns.project));
            Some((sandbox, place, root))
        };
        let box_ = |place: Option<&str>, root| Some(("box".into(), place.map(str::to_owned), root));
        assert_eq!(login("box"), box_(None, false));
        assert_eq!(login("root+box"), box_(None, true));
        assert_eq!(login("box.web.acme"), box_(Some("acme/web"), false));
        assert_eq!(login("root+box.web.acme.inc"), box_(Some("acme.inc/web"), true));
        for bad in ["", "root+", "box.web", "box..acme", "box.web.", ".web.acme", "a b", "b/x"] {
            assert_eq!(login(bad), None, "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_name_upsets_the_reader(text in "\\PC{0,80}") {
            let _ = read(&text);
        }
    }
}

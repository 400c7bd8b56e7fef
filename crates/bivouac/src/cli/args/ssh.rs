//! The shapes of the verbs about SSH: `ssh`, `ssh-config`, `ssh-key`. Part of `args`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// `ssh`
#[derive(Debug, Args)]
#[command(
    after_help = "Needs OpenSSH's client and nothing to be set up: key, known host and way are made by this \
    command. What follows NAME is OpenSSH's: flags, then a command."
)]
pub(crate) struct Ssh {
    /// Attach to this terminal session; it is opened if it does not run
    #[arg(long, value_name = "NAME")]
    pub(crate) terminal: Option<String>,
    /// For OpenSSH's ProxyCommand: the connection on standard input and output
    #[arg(long, hide = true, conflicts_with = "terminal")]
    pub(crate) stdio: bool,
    /// The sandbox: NAME, or NAME.PROJECT.TEAM; .bivouac may follow
    #[arg(value_parser = place)]
    pub(crate) name: Place,
    /// Flags of ssh, and a command; without one it is a shell
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "SSH-ARGS")]
    pub(crate) rest: Vec<String>,
}

/// A sandbox as `ssh` is told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// Its name.
    pub(crate) sandbox: String,
    /// Where it is, if that was told.
    pub(crate) namespace: Option<bivouac_types::name::Namespace>,
}

fn place(text: &str) -> Result<Place, String> {
    let bare = text.strip_suffix(".bivouac").unwrap_or(text);
    match crate::ssh::user::place(bare) {
        Some((sandbox, namespace)) => Ok(Place { sandbox, namespace }),
        None => Err("write NAME, or NAME.PROJECT.TEAM".to_owned()),
    }
}

/// `ssh-config`
#[derive(Debug, Args)]
pub(crate) struct SshConfig {
    /// Write it below ~/.ssh and have ~/.ssh/config include it
    #[arg(long)]
    pub(crate) write: bool,
    /// Take away what --write has written
    #[arg(long, conflicts_with = "write")]
    pub(crate) remove: bool,
}

/// `ssh-key …`
#[derive(Debug, Subcommand)]
pub(crate) enum SshKey {
    /// Register a public key: it has the rights of the token that you use
    Add {
        /// Its file [default: the key that bivouac ssh uses]
        file: Option<PathBuf>,
        /// What it is called [default: the comment in the file]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
    },
    /// List the keys that you registered
    #[command(visible_alias = "list")]
    Ls,
    /// Remove keys, by fingerprint or name
    #[command(visible_alias = "delete")]
    Rm {
        /// The keys
        #[arg(required = true, value_name = "KEY")]
        keys: Vec<String>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_of_the_config_is_a_sandbox() {
        let read = |text: &str| {
            let Place { sandbox, namespace } = place(text).ok()?;
            Some((sandbox, namespace.map(|ns| format!("{}/{}", ns.team, ns.project))))
        };
        assert_eq!(read("box"), Some(("box".to_owned(), None)));
        assert_eq!(read("box.bivouac"), Some(("box".to_owned(), None)));
        assert_eq!(
            read("My_Box.web.acme.bivouac"),
            Some(("My_Box".to_owned(), Some("acme/web".to_owned())))
        );
        assert_eq!(read("box.web"), None);
        assert_eq!(read("-oProxyCommand=x"), None);
    }
}

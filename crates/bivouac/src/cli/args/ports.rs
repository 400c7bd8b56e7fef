//! The shapes of verbs about ports: `ports`, `open`, `forward`. Part of `args`.

use std::time::Duration;

use clap::{Args, Subcommand};

use crate::cli::parse;

/// `ports`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub(crate) struct Ports {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: Option<String>,
    #[command(subcommand)]
    pub(crate) what: Option<PortsVerb>,
}

/// `ports …`
#[derive(Debug, Subcommand)]
pub(crate) enum PortsVerb {
    /// Open a port to everybody who has its address
    Publish(OnePort),
    /// Close a port to everybody but you; what strangers have open is cut
    Unpublish(OnePort),
    /// Print a link that lets its holder in
    Link {
        /// Which
        #[command(flatten)]
        port: OnePort,
        /// How long it is good for: 30m, 12h, 7d [default: 12h]
        #[arg(long, value_name = "TIME", value_parser = parse::duration)]
        ttl: Option<Duration>,
    },
    /// Make links and their cookies worthless; what came in by them is cut
    Revoke {
        /// The sandbox
        #[arg(value_parser = parse::sandbox_name)]
        name: String,
        /// Only of this port
        #[arg(value_parser = clap::value_parser!(u16).range(1..))]
        port: Option<u16>,
    },
}

/// A port of a sandbox.
#[derive(Debug, Args)]
pub(crate) struct OnePort {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// The port
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
}

/// `open`
#[derive(Debug, Args)]
pub(crate) struct Open {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// The port [default: the one that it has]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Option<u16>,
    /// Only print the link
    #[arg(long)]
    pub(crate) print: bool,
    /// How long the link is good for: 30m, 12h, 7d [default: 12h]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) ttl: Option<Duration>,
}

/// `forward`
#[derive(Debug, Args)]
#[command(after_help = "Ctrl-C ends it; connections that are open end with it.")]
pub(crate) struct Forward {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// Port here, and the one inside if it is another; 0 takes a free one
    #[arg(required = true, value_name = "PORT[:PORT]", value_parser = forwarded)]
    pub(crate) ports: Vec<Forwarded>,
    /// Let connections start a sandbox that does not run
    #[arg(long)]
    pub(crate) wake: bool,
}

/// A port here and one inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Forwarded {
    /// Here; 0 is any.
    pub(crate) local: u16,
    /// Inside.
    pub(crate) port: u16,
}

fn forwarded(text: &str) -> Result<Forwarded, String> {
    let wrong = || format!("'{text}' is no pair of ports: write 3000, 8080:3000 or 0:3000");
    let (local, port) = text.split_once(':').unwrap_or((text, text));
    let local = local.parse().map_err(|_| wrong())?;
    let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(wrong)?;
    Ok(Forwarded { local, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_ports() {
        assert_eq!(forwarded("3000"), Ok(Forwarded { local: 3000, port: 3000 }));
        assert_eq!(forwarded("0:80"), Ok(Forwarded { local: 0, port: 80 }));
        for bad in ["", "0", "x", "1:2:3", "80:0", "70000", ":80", "80:"] {
            assert!(forwarded(bad).is_err(), "{bad}");
        }
    }
}

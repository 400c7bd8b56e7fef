//! `bivouac completions`: what makes a shell complete our command line.
//!
//! What is printed registers this executable as the completer: at each Tab the shell calls it with
//! [`VARIABLE`] set, and `cli::main` answers from the live command line. So verbs and flags are never
//! out of date, and the names are those of sandboxes that exist now.

use std::ffi::OsString;

use clap_complete::CompleteEnv;
use clap_complete::env::{Bash, Elvish, EnvCompleter, Fish, Powershell, Zsh};

use super::args::{Completions, Global, Shell};
use super::failure::{ExitStatus, Failure, Outcome};
use super::{complete, output};

/// Set to the shell's name in a call that asks for candidates.
const VARIABLE: &str = "BIVOUAC_COMPLETE";
/// Found by the shell's own search path, so that an executable that moves is no trouble.
const PROGRAM: &str = "bivouac";

/// Prints the script.
pub(crate) fn run(global: &Global, args: &Completions) -> Outcome {
    let shell: &dyn EnvCompleter = match args.shell {
        Shell::Bash => &Bash,
        Shell::Zsh => &Zsh,
        Shell::Fish => &Fish,
        Shell::Elvish => &Elvish,
        Shell::Powershell => &Powershell,
    };
    let mut script = Vec::new();
    shell.write_registration(VARIABLE, PROGRAM, PROGRAM, PROGRAM, &mut script)?;
    let script =
        String::from_utf8(script).map_err(|_| Failure::new("the completion script is not text"))?;
    if global.json {
        output::json(&serde_json::json!({ "shell": shell.name(), "script": script }))?;
    } else {
        output::line(script.trim_end())?;
    }
    Ok(ExitStatus::Success)
}

/// Answers a shell that asks for candidates. `false`: this is an ordinary call.
pub(crate) fn answer(words: Vec<OsString>) -> bool {
    if std::env::var_os(VARIABLE).is_none_or(|shell| shell.is_empty()) {
        return false;
    }
    let folder = std::env::current_dir().ok();
    let completing = CompleteEnv::with_factory(complete::command).var(VARIABLE);
    // A mistake is not told: it would be printed into the line that is being typed.
    let _ = completing.try_complete(words, folder.as_deref());
    true
}

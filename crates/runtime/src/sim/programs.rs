//! The few programs of a simulated sandbox.

use bivouac_types::command::ExecFailure;

use super::SimSession;
use crate::RuntimeError;

/// What the few known programs do at once; `None`: it runs on.
pub(super) fn act(
    session: &mut SimSession,
    argv: &[&str],
) -> Result<Option<(String, i32)>, RuntimeError> {
    Ok(match argv {
        ["true"] => Some((String::new(), 0)),
        ["false"] => Some((String::new(), 1)),
        ["exit", code] => Some((String::new(), code.parse().unwrap_or(2))),
        ["echo", words @ ..] => Some((words.join(" ") + "\n", 0)),
        ["touch", name] => {
            let fresh = !session.files.contains(*name);
            if fresh && session.disk.left() == 0 {
                return Ok(Some(("Disk quota exceeded\n".to_owned(), 1)));
            }
            session.disk.charged += u64::from(fresh);
            session.files.insert((*name).to_owned());
            Some((String::new(), 0))
        }
        ["rm", name] => Some((String::new(), i32::from(!session.files.remove(*name)))),
        ["test", name] => Some((String::new(), i32::from(!session.files.contains(*name)))),
        // On a terminal it says again what it reads.
        ["sleep" | "sh" | "bash"] | ["bash", "-l"] | ["/bin/bash", "-l"] => None,
        // What the engine runs to fetch a source.
        ["sh", "-c", _, "source", url, ..] => {
            let broken = url.contains("broken");
            if !broken {
                session.files.insert("fetched".to_owned());
            }
            Some((String::new(), i32::from(broken)))
        }
        // A hook: a line of the words above.
        ["sh", "-c", line, _] => {
            let words: Vec<&str> = line.split_whitespace().collect();
            return act(session, &words);
        }
        _ => {
            let name = argv.first().unwrap_or(&"");
            return Err(RuntimeError::Exec {
                failure: ExecFailure::NotFound,
                message: format!("'{name}' was not found in PATH."),
            });
        }
    })
}

//! `bivouac help`: help for a verb, or a topic that no verb owns.

use super::args::Help;
use super::examples;
use super::failure::{ExitStatus, Failure, Outcome};
use super::output;

/// Topics beside the verbs.
const TOPICS: [(&str, &str); 1] = [("exit-codes", EXIT_CODES)];

const EXIT_CODES: &str = "\
Exit codes

  code    meaning
  0       done
  1       failed: an error line on stderr says what, a hint what to do next
  2       the command line is wrong; nothing was tried
  N       run, exec and wait: the command's own code, passed through
  126     run and exec: the command is there and cannot be executed
  127     run and exec: there is no such command
  128+N   run, exec and wait: the command was ended by signal N, for example 130 after
          Ctrl-C, 137 after SIGKILL: also at its --timeout or at the memory limit; a hint
          says which. Any verb that was itself asked to end by signal N
  141     the reader of standard output went away (128 + SIGPIPE)

A command that was lost (its sandbox died and the code cannot be known) is 1, never an
invented code. To tell a command's own 1 from ours, use --json: the last line holds its
exitCode.";

/// Prints help to stdout; an unknown topic is a usage error.
pub(crate) fn run(args: &Help) -> Outcome {
    output::line(&text(&args.topic)?)?;
    Ok(ExitStatus::Success)
}

fn text(topic: &[String]) -> Outcome<String> {
    if let [word] = topic
        && let Some((_, text)) = TOPICS.iter().find(|(name, _)| name == word)
    {
        return Ok((*text).to_owned());
    }
    let mut command = examples::command();
    // Built first, so that a verb's help knows the program's name and the global flags.
    command.build();
    let mut found = &mut command;
    for word in topic {
        found = found.find_subcommand_mut(word).ok_or_else(|| {
            Failure::usage(format!("there is no verb or topic '{}'", topic.join(" ")))
                .hint("bivouac help lists the verbs; topics: exit-codes")
        })?;
    }
    Ok(found.render_long_help().to_string().trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn help(topic: &[&str]) -> Outcome<String> {
        text(&topic.iter().map(|&word| word.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn verbs_and_topics_have_help() {
        assert!(help(&[]).unwrap().contains("exec"));
        let exec = help(&["exec"]).unwrap();
        assert!(exec.contains("--workdir") && exec.contains("bivouac exec"), "{exec}");
        assert!(help(&["snapshots", "ls"]).unwrap().contains("bivouac snapshots ls"));
        assert!(help(&["exit-codes"]).unwrap().contains("127"));
        assert_eq!(help(&["nonsense"]).unwrap_err().report(), ExitStatus::Usage);
        assert_eq!(help(&["exit-codes", "x"]).unwrap_err().report(), ExitStatus::Usage);
    }

    #[test]
    fn the_table_names_every_status_that_exists() {
        for code in [ExitStatus::Success, ExitStatus::Failure, ExitStatus::Usage] {
            assert!(EXIT_CODES.contains(&format!("\n  {}  ", code.code())));
        }
    }
}

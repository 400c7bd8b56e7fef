//! What `--help` shows below the flags: lines to copy.
//!
//! Invariant: every line is one that this command line takes (a test reads each), and every verb that
//! users call has one. Used by `cli::main` and by `help`.

use clap::{Command, CommandFactory as _};

use super::args::Cli;

/// Lines by verb.
const EXAMPLES: &[(&str, &[&str])] = &[
    ("serve", &["bivouac serve", "bivouac serve --listen 127.0.0.1:0 --data-dir /srv/bivouac"]),
    ("env", &["eval \"$(bivouac env)\"; node app.mjs", "bivouac env --format json"]),
    (
        "run",
        &[
            "bivouac run -- echo hello",
            "bivouac run -e TOKEN --timeout 5m -- sh -c 'make test'",
            "tar -c . | bivouac run -- tar -t",
        ],
    ),
    (
        "create",
        &[
            "bivouac create box",
            "bivouac create box --vcpus 4 --timeout 1h --tag team=web -p 3000",
            "bivouac create --snapshot snap_01 --ephemeral",
            "bivouac create box --idle-stop 30m --restart unless-stopped --pre-stop sync",
            "bivouac create box --allow github.com --allow '*.npmjs.org'",
            "bivouac create box --credential github --credential anthropic",
            "bivouac create box --mount data:/data --mount models:/models:snapshot",
            "bivouac create box --git https://git.example.com/app.git#main --disk 10G",
        ],
    ),
    (
        "ls",
        &[
            "bivouac ls",
            "bivouac ls --usage",
            "bivouac ls -A --tag team=web",
            "bivouac ls -q --prefix run-",
        ],
    ),
    ("inspect", &["bivouac inspect box", "bivouac inspect box --json"]),
    (
        "shell",
        &[
            "bivouac shell box",
            "bivouac shell box --terminal work -w /tmp",
            "bivouac shell box --new -u root",
            "bivouac shell box --terminal agent -- claude",
        ],
    ),
    ("terminals", &["bivouac terminals box"]),
    ("attach", &["bivouac attach box main", "bivouac attach box main --scrollback 1M"]),
    ("hangup", &["bivouac hangup box main"]),
    (
        "exec",
        &[
            "bivouac exec box -- ls -la",
            "bivouac exec -it box -- htop",
            "bivouac exec box -w /tmp -e A=1 -u root -- sh -c 'echo $A; id -u'",
            "bivouac exec -d box -- sleep 600",
        ],
    ),
    ("logs", &["bivouac logs box", "bivouac logs box cmd_01"]),
    ("ps", &["bivouac ps box"]),
    ("kill", &["bivouac kill box cmd_01", "bivouac kill box cmd_01 -s KILL"]),
    ("wait", &["bivouac wait box", "bivouac wait box cmd_01"]),
    ("stop", &["bivouac stop box other", "bivouac stop box --no-hook"]),
    ("pause", &["bivouac pause box other", "bivouac pause box --deep"]),
    ("resume", &["bivouac resume box"]),
    ("keep-alive", &["bivouac keep-alive box", "bivouac keep-alive box 8h"]),
    (
        "set",
        &[
            "bivouac set box --idle-stop 30m --idle-pause",
            "bivouac set box --restart unless-stopped --wake",
            "bivouac set box --pre-stop 'pg_ctl stop' --pre-stop-timeout 1m",
            "bivouac set box --idle-stop off",
        ],
    ),
    ("start", &["bivouac start box"]),
    ("resize", &["bivouac resize box --disk 20G", "bivouac resize box --vcpus 4"]),
    ("rm", &["bivouac rm box", "bivouac rm -f --snapshots box other"]),
    (
        "snapshot",
        &[
            "bivouac snapshot box --live --label step=tests-pass",
            "bivouac snapshot box",
            "bivouac snapshot box --expires 7d",
        ],
    ),
    ("snapshots ls", &["bivouac snapshots ls", "bivouac snapshots ls box --label step=tests-pass"]),
    ("snapshots get", &["bivouac snapshots get snap_01"]),
    (
        "snapshots tree",
        &["bivouac snapshots tree snap_01", "bivouac snapshots tree --down snap_01"],
    ),
    ("snapshots label", &["bivouac snapshots label snap_01 step=done draft-"]),
    (
        "snapshots export",
        &[
            "bivouac snapshots export snap_01 box.tar.zst",
            "bivouac snapshots export snap_01 - --format oci | podman load",
        ],
    ),
    ("snapshots import", &["bivouac snapshots import box.tar.zst --label from=laptop"]),
    ("snapshots rm", &["bivouac snapshots rm snap_01"]),
    (
        "token create",
        &[
            "bivouac token create ci -n team/web --allow read,exec,write --expires 30d",
            "bivouac token create look --in team/web --in team/api --allow read",
            "bivouac token create me --in 'team/*'",
        ],
    ),
    ("token ls", &["bivouac token ls", "bivouac token ls -a --json"]),
    ("token revoke", &["bivouac token revoke ci"]),
    ("token whoami", &["bivouac token whoami"]),
    ("token log", &["bivouac token log", "bivouac token log -f --token ci"]),
    ("policy show", &["bivouac policy show box", "bivouac policy show box --json"]),
    (
        "policy set",
        &[
            "bivouac policy set box deny-all",
            "bivouac policy set box policy.json",
            "bivouac policy set box '{\"allow\":[\"*.example.com\"]}'",
        ],
    ),
    ("policy allow", &["bivouac policy allow box github.com '*.npmjs.org' 192.0.2.0/24"]),
    ("policy deny", &["bivouac policy deny box 192.0.2.0/24 tracker.example.com"]),
    ("policy log", &["bivouac policy log -f box", "bivouac policy log box --json"]),
    ("policy explain", &["bivouac policy explain box https://api.example.com/v1/x --method POST"]),
    ("policy learn", &["bivouac policy learn box -- npm ci"]),
    ("drive create", &["bivouac drive create data --size 20G"]),
    ("drive ls", &["bivouac drive ls", "bivouac drive ls data:models"]),
    ("drive show", &["bivouac drive show data"]),
    ("drive rm", &["bivouac drive rm data"]),
    ("drive fork", &["bivouac drive fork data data-before"]),
    (
        "drive attach",
        &["bivouac drive attach box data:/data", "bivouac drive attach box data:/data:snapshot"],
    ),
    ("drive detach", &["bivouac drive detach box data", "bivouac drive detach box data --force"]),
    (
        "drive cp",
        &["bivouac drive cp model.bin data:models/model.bin", "bivouac drive cp data:notes.txt ."],
    ),
    ("drive cat", &["bivouac drive cat data:notes.txt"]),
    (
        "secret set",
        &[
            "bivouac secret set GITHUB_TOKEN < token.txt",
            "bivouac secret set DB --from vault:secret/ci/db#password",
            "bivouac secret set GITHUB_TOKEN --from github-app:12345/678901 --file app.pem",
        ],
    ),
    ("secret ls", &["bivouac secret ls"]),
    ("secret rm", &["bivouac secret rm GITHUB_TOKEN"]),
    ("credential ls", &["bivouac credential ls box"]),
    (
        "credential add",
        &[
            "bivouac credential add box github,push,repos=acme/app anthropic",
            "bivouac credential add box bearer=API_TOKEN,host=api.example.com,expires=1h",
        ],
    ),
    ("credential rm", &["bivouac credential rm box github"]),
    (
        "fork",
        &[
            "bivouac fork box",
            "bivouac fork box try --count 20",
            "bivouac fork box copy --snapshot snap_01 -e MODE=test",
        ],
    ),
    ("ports", &["bivouac ports box", "bivouac ports publish box 3000"]),
    ("ports publish", &["bivouac ports publish box 3000"]),
    ("ports unpublish", &["bivouac ports unpublish box 3000"]),
    ("ports link", &["bivouac ports link box 3000 --ttl 1h"]),
    ("ports revoke", &["bivouac ports revoke box", "bivouac ports revoke box 3000"]),
    ("open", &["bivouac open box", "bivouac open box 3000 --print"]),
    ("forward", &["bivouac forward box 3000", "bivouac forward box 8080:3000 5432"]),
    ("rollback", &["bivouac rollback box", "bivouac rollback box snap_01 --discard"]),
    ("gc", &["bivouac gc --dry-run", "bivouac gc"]),
    ("top", &["bivouac top", "bivouac top -A --sort memory", "bivouac top --once"]),
    ("pool show", &["bivouac pool show"]),
    ("pool migrate", &["bivouac pool migrate --to loop"]),
    ("image build", &["bivouac image build", "bivouac image build --rebuild"]),
    (
        "image pull",
        &[
            "bivouac image pull docker://registry.example.com/team/app:1.2",
            "bivouac image pull docker://registry.example.com/team/app --registry-secret REGISTRY",
        ],
    ),
    (
        "image import",
        &[
            "docker save app:1.2 | bivouac image import -",
            "bivouac image import ./layout --name app",
        ],
    ),
    ("image ls", &["bivouac image ls"]),
    ("image inspect", &["bivouac image inspect app:1.2"]),
    ("image prune", &["bivouac image prune --dry-run", "bivouac image prune --all"]),
    ("image rm", &["bivouac image rm universal"]),
    ("doctor", &["bivouac doctor", "bivouac doctor --json"]),
    (
        "completions",
        &[
            "bivouac completions bash > /etc/bash_completion.d/bivouac",
            "bivouac completions zsh > ~/.zfunc/_bivouac",
            "bivouac completions fish > ~/.config/fish/completions/bivouac.fish",
        ],
    ),
    ("help", &["bivouac help exec", "bivouac help exit-codes"]),
];
/// Verbs whose own text has examples already, or that need none.
#[cfg(test)]
const WITHOUT: [&str; 6] = ["cp", "version", "selftest", "snapshots", "secret", "credential"];

/// The command line with its examples.
pub(crate) fn command() -> Command {
    let mut command = Cli::command();
    for (verb, lines) in EXAMPLES {
        command = match verb.split_once(' ') {
            Some((verb, below)) => {
                command.mut_subcommand(verb, |verb| verb.mut_subcommand(below, |c| with(c, lines)))
            }
            None => command.mut_subcommand(verb, |verb| with(verb, lines)),
        };
    }
    command
}

fn with(command: Command, lines: &[&str]) -> Command {
    let mut text = command.get_after_help().map(|told| format!("{told}\n")).unwrap_or_default();
    text.push_str("Examples:");
    for line in lines {
        text.push_str("\n  ");
        text.push_str(line);
    }
    command.after_help(text)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    /// The words of our own command in a line, as a shell would split them.
    fn words(line: &str) -> Vec<String> {
        let ours = line.split("bivouac ").nth(1).unwrap_or_default();
        let ours = ours.split([';', '|', '>']).next().unwrap_or_default().trim_end();
        let ours = ours.strip_suffix(")\"").unwrap_or(ours);
        let (mut words, mut word, mut quoted, mut begun) =
            (Vec::new(), String::new(), false, false);
        for c in ours.chars() {
            match c {
                '\'' => (quoted, begun) = (!quoted, true),
                ' ' if !quoted => {
                    if begun {
                        words.push(std::mem::take(&mut word));
                    }
                    begun = false;
                }
                c => {
                    word.push(c);
                    begun = true;
                }
            }
        }
        if begun {
            words.push(word);
        }
        words
    }

    #[test]
    fn every_example_is_a_line_that_is_taken() {
        for (verb, lines) in EXAMPLES {
            for line in *lines {
                // A quoted part may hold a semicolon that is not the shell's.
                let line = line.replace("'echo $A; id -u'", "'echo $A'");
                let all = std::iter::once("bivouac".to_owned()).chain(words(&line));
                let parsed = Cli::try_parse_from(all);
                assert!(
                    parsed.is_ok(),
                    "{verb}: {line}: {:?}",
                    parsed.err().map(|e| e.to_string())
                );
                let first: Vec<String> = words(&line);
                let verb = verb.split(' ').next().unwrap_or_default();
                assert!(first.iter().any(|word| word == verb), "{line} is no example of {verb}");
            }
        }
    }

    #[test]
    fn every_verb_has_an_example() {
        for verb in Cli::command().get_subcommands() {
            let name = verb.get_name();
            let shown = EXAMPLES.iter().any(|(known, _)| known.split(' ').next() == Some(name));
            assert!(shown || WITHOUT.contains(&name), "{name} has no example");
        }
    }

    #[test]
    fn examples_come_below_what_a_verb_says_itself() {
        let mut command = command();
        command.build();
        let run = command.find_subcommand_mut("run").unwrap().render_long_help().to_string();
        let (own, examples) = (run.find("Standard input is passed"), run.find("Examples:"));
        assert!(own.is_some() && own < examples, "{run}");
    }
}

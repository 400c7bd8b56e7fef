//! The command line's shape: every verb, flag and help text, as clap types.
//!
//! Invariant: nothing here acts; a value that gets past these types has the right form. Read by
//! `cli::main` and by each verb.

mod around;
mod drive;
mod image;
mod life;
mod pool;
mod ports;
mod state;
mod terminal;
mod token;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bivouac_types::name::Namespace;
use clap::{Args, Parser, Subcommand, ValueEnum};

use super::credential::CredentialArg;
use super::parse::{self, EnvVar, Place};

pub(crate) use self::around::{Completions, Gc, Resize, Shell, SortBy, Top};
pub(crate) use self::drive::Drive;
pub(crate) use self::image::{Image, ImagesFolder, PullImage, RegistryLogin};
pub(crate) use self::life::{Idle, KeepAlive, LifeArgs, Pause, RestartArg, Set, Stop};
pub(crate) use self::pool::{Pool, PoolArg};
pub(crate) use self::ports::{Forward, Forwarded, Open, Ports, PortsVerb};
pub(crate) use self::state::{ExportFormat, Fork, Import, Rollback, Snapshot, Snapshots};
pub(crate) use self::terminal::{Attach, Hangup, ShellIn};
pub(crate) use self::token::Token;

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "bivouac",
    version,
    about = "Sandboxes for agents and people: disposable workers and durable boxes, one engine",
    disable_help_subcommand = true,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "Exit codes: bivouac help exit-codes"
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// Flags that every verb takes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// JSON on stdout instead of tables
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Whole tables, however narrow the terminal is
    #[arg(long, global = true)]
    pub(crate) no_trunc: bool,
    /// Namespace of the sandboxes
    #[arg(short = 'n', long = "namespace", global = true, value_name = "TEAM/PROJECT",
        default_value = "local/local", value_parser = parse::namespace)]
    pub(crate) namespace: Namespace,
    /// Nobody named it: a token that is not the engine's own means its first one.
    #[arg(skip)]
    pub(crate) unnamed: bool,
    /// Engine to talk to, with the token in BIVOUAC_TOKEN [default: the engine of the data folder]
    #[arg(long, global = true, env = "BIVOUAC_URL", value_name = "URL", hide_env = true)]
    pub(crate) url: Option<String>,
    /// Folder of the engine's state [default: /var/lib/bivouac as root]
    #[arg(long, global = true, env = "BIVOUAC_DATA_DIR", value_name = "DIR", hide_env = true)]
    pub(crate) data_dir: Option<PathBuf>,
}

/// What can be done.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Start the engine on this machine
    Serve(Box<Serve>),
    /// Print the variables that point unmodified clients at the engine
    Env(EnvVars),
    /// Run one command in a sandbox of its own and leave nothing behind
    Run(Run),
    /// Create a sandbox
    Create(Create),
    /// List sandboxes
    #[command(visible_alias = "list")]
    Ls(Ls),
    /// Show one sandbox
    Inspect(One),
    /// Run a command in a sandbox
    Exec(Exec),
    /// Attach to a terminal of a sandbox, opened if it does not run
    Shell(ShellIn),
    /// List the terminals of a sandbox that run
    Terminals(One),
    /// Attach to a terminal that runs
    Attach(Attach),
    /// Hang terminals up: what runs on them is told, and ended five seconds later
    Hangup(Hangup),
    /// Show a command's output from its start, and follow it until it ends
    Logs(Logs),
    /// Copy files and folders into and out of a sandbox
    Cp(Cp),
    /// List the commands of a sandbox
    Ps(One),
    /// Send a signal to a command
    Kill(Kill),
    /// Wait for a command and exit with its code
    Wait(Wait),
    /// Stop sandboxes; their files are kept unless they are ephemeral
    Stop(Stop),
    /// Have sandboxes stand still, with their memory
    Pause(Pause),
    /// Let paused sandboxes go on where they stood
    Resume(Several),
    /// Count as use of a running sandbox, and give it time
    KeepAlive(KeepAlive),
    /// Change the rules for a sandbox's life: idle stop, restart, wake, pre-stop
    Set(Set),
    /// Start stopped sandboxes from their last state
    Start(Several),
    /// Change what a sandbox may use, from its next start on
    Resize(Resize),
    /// Delete sandboxes, running or not
    #[command(visible_alias = "delete")]
    Rm(Rm),
    /// Snapshot a sandbox; its session stops, but for --live
    Snapshot(Snapshot),
    /// List, show, label and delete snapshots
    #[command(subcommand)]
    Snapshots(Snapshots),
    /// See and change what a sandbox may reach, and what it tried to
    #[command(subcommand)]
    Policy(Policy),
    /// Build, pull, import, list and remove the images that sandboxes start from
    #[command(subcommand)]
    Image(Image),
    /// See how volumes are kept, and move them to another way
    #[command(subcommand)]
    Pool(Pool),
    /// Secrets for credentials and policies: written, used, never read back
    #[command(subcommand)]
    Secret(Secret),
    /// Let a sandbox use a secret that it never sees
    #[command(subcommand)]
    Credential(Credential),
    /// Tokens with some of your rights: make, list, take back; who used what
    #[command(subcommand)]
    Token(Token),
    /// Volumes that outlive sandboxes: make, mount, copy, look into
    #[command(subcommand)]
    Drive(Drive),
    /// Create sandboxes as copies of another, which goes on
    Fork(Fork),
    /// Have a sandbox go back to a snapshot
    Rollback(Rollback),
    /// Show the ports of a sandbox; open them to others, close them, make links
    Ports(Ports),
    /// Open a port of a sandbox in a browser, or print a link to it
    Open(Open),
    /// Reach ports of a sandbox on this machine's loopback
    Forward(Forward),
    /// Check whether this machine can run the engine, and how to mend what is missing
    Doctor,
    /// Show what running sandboxes use, live
    Top(Top),
    /// Remove what the engine keeps for nobody, and tell of records whose data is gone
    Gc(Gc),
    /// Print what makes a shell complete this command line
    Completions(Completions),
    /// Show help for a verb, or a topic: exit-codes
    Help(Help),
    /// Print the version
    Version,
    /// What tests of this executable need to know
    #[command(subcommand, hide = true)]
    Selftest(Selftest),
}

/// `serve`
#[derive(Debug, Args)]
#[command(
    after_help = "Ctrl-C or SIGTERM stops the engine; sandboxes go on and the next start adopts them."
)]
pub(crate) struct Serve {
    /// Where the API listens; port 0 takes a free one
    #[arg(long, env = "BIVOUAC_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:7070")]
    pub(crate) listen: SocketAddr,
    /// Where records are kept [default: a SQLite file in the data folder]
    #[arg(long, env = "BIVOUAC_DATABASE", value_name = "URL", hide_env_values = true)]
    pub(crate) database: Option<String>,
    /// Where exported bytes are kept (a later release)
    #[arg(long, env = "BIVOUAC_BLOBS", value_name = "URL", hide_env_values = true, hide = true)]
    pub(crate) blobs: Option<String>,
    /// Folder of read-only images, shared by engines [default: /var/cache/bivouac/images as root]
    #[arg(long, env = "BIVOUAC_IMAGES", value_name = "DIR")]
    pub(crate) images: Option<PathBuf>,
    /// How volumes are kept: a btrfs in a file (loop), a btrfs that holds nothing else (native), plain folders
    /// without disk limits (folder) [default: what the data folder has, else loop, else folder]
    #[arg(long, env = "BIVOUAC_POOL", value_enum, value_name = "MODE", default_value_t = PoolArg::Auto)]
    pub(crate) pool: PoolArg,
    /// For tests: a pool that is soon full
    #[arg(long, env = "BIVOUAC_TEST_POOL_MB", value_name = "MB", hide = true,
        value_parser = clap::value_parser!(u64).range(256..1 << 20))]
    pub(crate) test_pool_mb: Option<u64>,
    /// Image used when a create names none [default: universal once it is built, else host]
    #[arg(long, env = "BIVOUAC_IMAGE", value_name = "NAME")]
    pub(crate) image: Option<String>,
    /// What links say [default: the listen address]
    #[arg(long, value_name = "URL")]
    pub(crate) public_url: Option<String>,
    /// Stop every sandbox before the engine exits
    #[arg(long, env = "BIVOUAC_STOP_SANDBOXES", value_parser = clap::builder::BoolishValueParser::new(),
        num_args = 0..=1, default_value_t = false, default_missing_value = "true", require_equals = true)]
    pub(crate) stop_sandboxes: bool,
    /// Also serve /metrics here, without a token; /metrics of --listen needs one
    #[arg(long, env = "BIVOUAC_METRICS_LISTEN", value_name = "ADDR")]
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Form of the log on stderr; BIVOUAC_LOG filters it (info, debug, bivouac_engine=trace)
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
    /// DNS server that sandboxes' names are looked up at [default: the host's]
    #[arg(long, env = "BIVOUAC_RESOLVER", value_name = "ADDR[:PORT]")]
    pub(crate) resolver: Option<String>,
    /// More root certificates (PEM) for what sandboxes reach; they trust them too
    #[arg(long, env = "BIVOUAC_EXTRA_CA", value_name = "FILE")]
    pub(crate) extra_ca: Option<PathBuf>,
    /// Private or local range that policies may allow (repeat for more); all others are closed always
    #[arg(long, env = "BIVOUAC_EGRESS_ALLOW_PRIVATE", value_name = "CIDR", value_delimiter = ',')]
    pub(crate) egress_allow_private: Vec<String>,
    /// What identity tokens say of their issuer [default: what links say]
    #[arg(long, env = "BIVOUAC_ISSUER", value_name = "URL")]
    pub(crate) issuer: Option<String>,
    /// Domain below which routes have their names as well, with a wildcard in its DNS and TLS before it (your
    /// own, or --preview-listen); with the port that browsers see, if that is not 443
    #[arg(long, env = "BIVOUAC_PREVIEW_DOMAIN", value_name = "DOMAIN[:PORT]")]
    pub(crate) preview_domain: Option<String>,
    /// Serve routes over TLS here, and nothing else
    #[arg(long, env = "BIVOUAC_PREVIEW_LISTEN", value_name = "ADDR",
        requires_all = ["preview_domain", "preview_cert", "preview_key"])]
    pub(crate) preview_listen: Option<SocketAddr>,
    /// Certificate of *.DOMAIN for --preview-listen, PEM; read again when it changes
    #[arg(long, env = "BIVOUAC_PREVIEW_CERT", value_name = "FILE", requires = "preview_listen")]
    pub(crate) preview_cert: Option<PathBuf>,
    /// Its key, PEM
    #[arg(long, env = "BIVOUAC_PREVIEW_KEY", value_name = "FILE", requires = "preview_listen")]
    pub(crate) preview_key: Option<PathBuf>,
    /// Where SSH listens (a later release)
    #[arg(long, value_name = "ADDR", hide = true)]
    pub(crate) ssh: Option<String>,
    /// References to this host that secrets may be, or none: who has the token can read by them what the
    /// engine can
    #[arg(long, env = "BIVOUAC_SECRET_SOURCES", value_name = "KINDS", value_delimiter = ',',
        default_value = "env,file,exec,vault", value_parser = ["env", "file", "exec", "vault", "none"])]
    pub(crate) secret_sources: Vec<String>,
    /// Key that secrets are sealed with; made at the first start [default: vault.key beside the database]
    #[arg(long, env = "BIVOUAC_VAULT_KEY", value_name = "FILE")]
    pub(crate) vault_key: Option<PathBuf>,
    /// Also serve vercel.com and oidc.vercel.com on 127.0.0.1:443, for clients that only take those
    /// names: `bivouac env --tls` tells what they need
    #[arg(long)]
    pub(crate) clients_tls: bool,
    /// Most bytes that a sandbox may hold over its image: 10G, 500M [default: 32G]
    #[arg(long, env = "BIVOUAC_DISK", value_name = "SIZE", value_parser = parse::disk_size)]
    pub(crate) disk: Option<u64>,
    /// For tests: a disk that is soon full
    #[arg(long, env = "BIVOUAC_TEST_DISK_MB", value_name = "MB", hide = true,
        value_parser = clap::value_parser!(u64).range(1..1 << 40))]
    pub(crate) test_disk_mb: Option<u64>,
    /// For the engine that `bivouac run` starts: a session of its own, and an end, sandboxes
    /// included, when nothing was asked and nothing ran for so long
    #[arg(long, value_name = "SECONDS", hide = true)]
    pub(crate) idle_exit: Option<u64>,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// One JSON object per line
    Json,
}

/// `env`
#[derive(Debug, Args)]
#[command(after_help = "Use: eval \"$(bivouac env)\"; node app.mjs")]
pub(crate) struct EnvVars {
    /// Shell lines to evaluate, or a JSON object [default: sh, or json with --json]
    #[arg(long, value_enum)]
    pub(crate) format: Option<EnvFormat>,
    /// For clients of an engine with --clients-tls: certificates to trust, and no shim for Node
    #[arg(long)]
    pub(crate) tls: bool,
}

/// How variables are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EnvFormat {
    /// export NAME='value'
    Sh,
    /// {"NAME": "value"}
    Json,
}

/// What a new sandbox is made of; shared by `run` and `create`.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sandbox options")]
pub(crate) struct NewSandbox {
    /// Image to start from: a name of image ls, or docker://HOST/REPOSITORY:TAG [default: the engine's]
    #[arg(long, value_name = "NAME")]
    pub(crate) image: Option<String>,
    #[command(flatten)]
    pub(crate) registry: RegistryLogin,
    /// Runtime to start from, for example node24
    #[arg(long, value_name = "NAME", conflicts_with = "image")]
    pub(crate) runtime: Option<String>,
    /// Snapshot to start from
    #[arg(long, value_name = "ID", value_parser = snapshot_id)]
    pub(crate) snapshot: Option<String>,
    /// Repository that is cloned into its working folder; behind # a branch, tag or commit
    #[arg(long, value_name = "URL[#REVISION]", conflicts_with_all = ["snapshot", "tarball"])]
    pub(crate) git: Option<String>,
    /// Gzip tar that is unpacked into its working folder
    #[arg(long, value_name = "URL", conflicts_with = "snapshot")]
    pub(crate) tarball: Option<String>,
    /// Virtual CPUs: 1 or an even number; each brings 2048 MB of memory [default: 2]
    #[arg(long, value_name = "N")]
    pub(crate) vcpus: Option<i64>,
    /// Most that it may hold over its image: 500M, 10G [default: the engine's --disk]
    #[arg(long, value_name = "SIZE", value_parser = parse::disk_size)]
    pub(crate) disk: Option<u64>,
    /// Drive that it has (repeat for more, 4 at most); with :snapshot a private copy of it
    #[arg(long = "mount", value_name = "DRIVE:/PATH[:snapshot]", value_parser = parse::mount)]
    pub(crate) mounts: Vec<parse::MountArg>,
    /// Port to route (repeat for more)
    #[arg(short = 'p', long = "port", value_name = "PORT")]
    pub(crate) ports: Vec<u16>,
    /// Label (repeat for more)
    #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = parse::tag)]
    pub(crate) tags: Vec<(String, String)>,
    /// What the sandbox may reach: allow-all, deny-all, a file or JSON [default: allow-all]
    #[arg(long, value_name = "POLICY", value_parser = parse::policy)]
    pub(crate) network_policy: Option<PolicyArg>,
    /// Host or range that may be reached, and nothing else (repeat for more)
    #[arg(long = "allow", value_name = "HOST|CIDR", value_parser = parse::target)]
    pub(crate) allow: Vec<String>,
    /// Credential that its requests get outside of it: github, npm, anthropic, openai, aws, basic or
    /// bearer, as KIND[=SECRET][,OPTION[=VALUE]] (repeat for more)
    #[arg(long = "credential", value_name = "KIND[=SECRET]", value_parser = super::credential::argument)]
    pub(crate) credentials: Vec<CredentialArg>,
}

/// An egress policy on the command line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PolicyArg {
    /// One that has a name.
    Mode(&'static str),
    /// JSON.
    Inline(serde_json::Value),
    /// A file of JSON.
    File(PathBuf),
    /// Standard input.
    Stdin,
}

/// `policy …`
#[derive(Debug, Subcommand)]
pub(crate) enum Policy {
    /// Show what a sandbox may reach; values of headers are hidden
    Show {
        /// The sandbox
        #[arg(value_parser = parse::sandbox_name)]
        name: String,
    },
    /// Replace it: in force when this answers, and connections that it forbids are cut
    Set {
        /// The sandbox
        #[arg(value_parser = parse::sandbox_name)]
        name: String,
        /// allow-all, deny-all, a file, JSON, or - for standard input
        #[arg(value_name = "POLICY", value_parser = parse::policy)]
        policy: PolicyArg,
    },
    /// Let more be reached
    Allow {
        /// The sandbox
        #[arg(value_parser = parse::sandbox_name)]
        name: String,
        /// HOST, *.HOST, HOST:PORT, ADDRESS or ADDRESS/BITS
        #[arg(required = true, value_name = "HOST|CIDR", value_parser = parse::target)]
        targets: Vec<String>,
    },
    /// Let less be reached; connections there are cut
    Deny {
        /// The sandbox
        #[arg(value_parser = parse::sandbox_name)]
        name: String,
        /// HOST, *.HOST, HOST:PORT, ADDRESS or ADDRESS/BITS
        #[arg(required = true, value_name = "HOST|CIDR", value_parser = parse::target)]
        targets: Vec<String>,
    },
    /// Show what was decided: names, connections, requests
    Log {
        /// The sandbox
        #[arg(value_parser = parse::sandbox_name)]
        name: String,
        /// Wait for more until the session ends
        #[arg(short = 'f', long)]
        follow: bool,
        /// Of this session [default: the newest]
        #[arg(long, value_name = "ID")]
        session: Option<String>,
        /// Go on where a line's `next` says
        #[arg(long, value_name = "N")]
        since: Option<u64>,
    },
    /// Say what would happen to a request, and which entry decides; nothing is sent
    Explain {
        /// The sandbox
        #[arg(value_parser = parse::sandbox_name)]
        name: String,
        /// https://HOST/PATH, http://… or HOST:PORT
        // Not `url`: that is the engine's, a flag of every verb.
        #[arg(value_name = "URL")]
        request: String,
        /// Method of the request
        #[arg(long, default_value = "GET")]
        method: String,
    },
    /// Run a command with everything open and print the smallest policy that it needs
    Learn(Learn),
}

/// `secret …`
#[derive(Debug, Subcommand)]
pub(crate) enum Secret {
    /// Set a secret from standard input, a file or a reference; sandboxes that use it get it at once
    Set {
        /// Its name
        #[arg(value_parser = parse::secret_name)]
        name: String,
        /// File that it is in
        #[arg(long, value_name = "FILE", value_parser = super::secret::file)]
        file: Option<PathBuf>,
        /// Where the engine takes it from, each time: env:NAME, file:/PATH, exec:PROGRAM ARGS,
        /// vault:MOUNT/PATH#FIELD; or github-app:APP/INSTALLATION with the App's key as the value
        #[arg(long, value_name = "REFERENCE")]
        from: Option<String>,
        /// For those who write it here: it is refused
        #[arg(hide = true)]
        value: Vec<String>,
    },
    /// List secrets: names, kinds and dates
    #[command(visible_alias = "list")]
    Ls,
    /// Remove secrets; requests that need them are refused from then on
    #[command(visible_alias = "delete")]
    Rm {
        /// The secrets
        #[arg(required = true, value_name = "NAME", value_parser = parse::secret_name)]
        names: Vec<String>,
    },
}

/// `credential …`
#[derive(Debug, Subcommand)]
pub(crate) enum Credential {
    /// List the credentials of a sandbox
    #[command(visible_alias = "list")]
    Ls {
        /// The sandbox
        #[arg(value_parser = parse::sandbox_name)]
        name: String,
    },
    /// Give a sandbox credentials; its running commands can use them at once
    #[command(after_help = "Kinds, the secret they use when none is named, and their options:\n\
        \x20 github     GITHUB_TOKEN       push, write, repos=OWNER/NAME+…\n\
        \x20 npm        NPM_TOKEN          registry=URL or scope=@NAME [npm's own], publish\n\
        \x20 anthropic  ANTHROPIC_API_KEY  host=, path=\n\
        \x20 openai     OPENAI_API_KEY     host=, path=\n\
        \x20 aws        AWS_CREDENTIALS    service=, region=, host=\n\
        \x20 basic      (name one)         host=, user=, path=, methods=GET+HEAD\n\
        \x20 bearer     (name one)         host=, header=, env=, path=, methods=\n\
        All take name=, actor= and expires=1h.")]
    Add {
        /// The sandbox
        #[arg(value_parser = parse::sandbox_name)]
        name: String,
        /// KIND[=SECRET][,OPTION[=VALUE]]
        #[arg(required = true, value_name = "KIND[=SECRET]", value_parser = super::credential::argument)]
        credentials: Vec<CredentialArg>,
    },
    /// Take credentials away; requests that use them are cut
    #[command(visible_alias = "delete")]
    Rm {
        /// The sandbox
        #[arg(value_parser = parse::sandbox_name)]
        name: String,
        /// The credentials, as `credential ls` names them
        #[arg(required = true, value_name = "CREDENTIAL")]
        credentials: Vec<String>,
    },
}

/// `policy learn`
#[derive(Debug, Args)]
#[command(
    after_help = "The sandbox has its own policy back when this ends, however it ends. Rules and denied ranges stay\n\
    in force meanwhile."
)]
pub(crate) struct Learn {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) process: Process,
    /// Command and its arguments; no shell is involved
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

/// `run`
#[derive(Debug, Args)]
#[command(
    after_help = "Starts an engine when none is running; it ends by itself when it is idle.\n\
    Standard input is passed when it is a pipe or a file, and with -i."
)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) sandbox: NewSandbox,
    #[command(flatten)]
    pub(crate) process: Process,
    /// Command and its arguments; no shell is involved
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

/// How a command runs; shared by `run` and `exec`.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Command options")]
pub(crate) struct Process {
    /// Pass standard input
    #[arg(short = 'i', long)]
    pub(crate) interactive: bool,
    /// Give the command a terminal, and this one's keys; ~. at the beginning of a line leaves
    #[arg(short = 't', long)]
    pub(crate) tty: bool,
    /// Working folder
    #[arg(short = 'w', long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// Variable for the command; a name alone takes the caller's value (repeat for more)
    #[arg(short = 'e', long = "env", value_name = "K[=V]", value_parser = parse::env_var)]
    pub(crate) env: Vec<EnvVar>,
    /// User that runs it
    #[arg(short = 'u', long, value_enum, default_value_t = User::VercelSandbox)]
    pub(crate) user: User,
    /// Kill the command after so long: 90s, 5m, 1h
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) timeout: Option<Duration>,
}

/// Who runs a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum User {
    /// Uid 1000, the default
    VercelSandbox,
    /// Root of the sandbox, nobody outside
    Root,
}

/// `create`
#[derive(Debug, Args)]
pub(crate) struct Create {
    /// Its name [default: a generated one]
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) sandbox: NewSandbox,
    #[command(flatten)]
    pub(crate) life: LifeArgs,
    /// How long a session may live: 5m, 1h [default: 5m]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) timeout: Option<Duration>,
    /// Variable for every command; a name alone takes the caller's value (repeat for more)
    #[arg(short = 'e', long = "env", value_name = "K[=V]", value_parser = parse::env_var)]
    pub(crate) env: Vec<EnvVar>,
    /// Forget the files when it stops
    #[arg(long, alias = "no-persistent")]
    pub(crate) ephemeral: bool,
}

/// `ls`
#[derive(Debug, Args)]
pub(crate) struct Ls {
    /// Sandboxes of all namespaces
    #[arg(short = 'A', long = "all-namespaces")]
    pub(crate) all_namespaces: bool,
    /// Only with this label
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse::tag)]
    pub(crate) tag: Option<(String, String)>,
    /// Only names that begin so
    #[arg(long, value_name = "TEXT")]
    pub(crate) prefix: Option<String>,
    /// Only names
    #[arg(short = 'q', long)]
    pub(crate) quiet: bool,
    /// Also what each holds on disk, and what of that is its alone: walks through all their files
    #[arg(long, conflicts_with = "quiet")]
    pub(crate) usage: bool,
}

/// Verbs with one sandbox and nothing else.
#[derive(Debug, Args)]
pub(crate) struct One {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
}

/// Verbs with several sandboxes.
#[derive(Debug, Args)]
pub(crate) struct Several {
    /// The sandboxes
    #[arg(required = true, value_name = "NAME", value_parser = parse::sandbox_name)]
    pub(crate) names: Vec<String>,
}

/// `exec`
#[derive(Debug, Args)]
#[command(
    after_help = "A stopped sandbox is started first. Ctrl-C interrupts the command, a second one kills it."
)]
pub(crate) struct Exec {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) process: Process,
    /// Start it, print its id and leave it running
    #[arg(short = 'd', long, conflicts_with = "interactive")]
    pub(crate) detach: bool,
    /// Command and its arguments; no shell is involved
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

/// `logs`
#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// The command's id [default: the newest command]
    #[arg(value_parser = command_id)]
    pub(crate) command: Option<String>,
    /// Follow until the command ends; the default, for those who are used to it
    #[arg(short = 'f', long)]
    pub(crate) follow: bool,
}

/// `cp`
#[derive(Debug, Args)]
#[command(
    after_help = "Folders are copied with what is in them. An existing folder, or a target that ends in '/', \
    takes the source under its own name.\nExamples:\n  bivouac cp notes.txt box:\n  \
    bivouac cp box:/etc/os-release -\n  tar -c . | bivouac cp - box:/tmp/all.tar"
)]
pub(crate) struct Cp {
    /// What to copy: PATH, NAME:PATH, or - for standard input
    #[arg(value_name = "SOURCE", value_parser = parse::place)]
    pub(crate) source: Place,
    /// Where to: PATH, NAME:PATH, or - for standard output
    #[arg(value_name = "TARGET", value_parser = parse::place)]
    pub(crate) target: Place,
}

/// `kill`
#[derive(Debug, Args)]
pub(crate) struct Kill {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// The command's id, from `ps` or `exec -d`
    #[arg(value_parser = command_id)]
    pub(crate) command: String,
    /// Signal, by name or number
    #[arg(short = 's', long, value_name = "SIGNAL", default_value = "TERM", value_parser = parse::signal,
        allow_negative_numbers = true)]
    pub(crate) signal: i32,
}

/// `wait`
#[derive(Debug, Args)]
pub(crate) struct Wait {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// The command's id [default: the newest command]
    #[arg(value_parser = command_id)]
    pub(crate) command: Option<String>,
}

/// `rm`
#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// The sandboxes
    #[arg(required = true, value_name = "NAME", value_parser = parse::sandbox_name)]
    pub(crate) names: Vec<String>,
    /// A missing sandbox is no error
    #[arg(short = 'f', long)]
    pub(crate) force: bool,
    /// Also delete their snapshots that nothing else needs
    #[arg(long)]
    pub(crate) snapshots: bool,
}

/// `selftest …`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Subcommand)]
pub(crate) enum Selftest {
    /// The names that BIVOUAC_TEST_FAULT takes, one a line
    FaultPoints,
    /// The JSON Schemas of docs/schemas, by file name
    Schemas,
}

/// `help`
#[derive(Debug, Args)]
pub(crate) struct Help {
    /// A verb, or a topic
    pub(crate) topic: Vec<String>,
}

/// Ids go into paths of the API: only what an id can be gets there.
fn id(text: &str, prefix: &str) -> Result<String, String> {
    let tail = text.strip_prefix(prefix).unwrap_or("");
    if tail.is_empty() || !tail.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
    {
        return Err(format!("'{text}' is no id: it begins with {prefix}"));
    }
    Ok(text.to_owned())
}

fn command_id(text: &str) -> Result<String, String> {
    id(text, "cmd_")
}

fn snapshot_id(text: &str) -> Result<String, String> {
    id(text, "snap_")
}

-- Forward only; the same text for SQLite and PostgreSQL. Columns are TEXT, BIGINT or BLOB; 0 and 1
-- stand for no and yes. What SQL has to look at is a column, the rest of a configuration is one
-- JSON text in `config`, so that nothing is written in two places.

CREATE TABLE bivouac (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
);
INSERT INTO bivouac (key, value) VALUES ('product', 'bivouac');

CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    team TEXT NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    ephemeral BIGINT NOT NULL,
    persistent BIGINT NOT NULL,
    config TEXT NOT NULL,
    current_session_id TEXT NOT NULL,
    current_snapshot_id TEXT,
    status TEXT NOT NULL,
    status_updated_at BIGINT NOT NULL,
    generation BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    total_active_cpu_ms BIGINT NOT NULL,
    total_duration_ms BIGINT NOT NULL,
    create_key TEXT,
    -- The intent to delete: 0 no, 1 yes, 2 together with its orphaned snapshots.
    deleting BIGINT NOT NULL
);
CREATE UNIQUE INDEX sandboxes_name ON sandboxes (team, project, name);
CREATE UNIQUE INDEX sandboxes_create_key ON sandboxes (team, project, create_key);
CREATE INDEX sandboxes_created ON sandboxes (created_at, id);
CREATE INDEX sandboxes_snapshot ON sandboxes (current_snapshot_id);

CREATE TABLE sandbox_tags (
    sandbox_id TEXT NOT NULL REFERENCES sandboxes (id),
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, key)
);

CREATE TABLE routes (
    subdomain TEXT PRIMARY KEY,
    sandbox_id TEXT NOT NULL REFERENCES sandboxes (id),
    port BIGINT NOT NULL
);
CREATE UNIQUE INDEX routes_sandbox ON routes (sandbox_id, port);

CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    sandbox_id TEXT NOT NULL REFERENCES sandboxes (id),
    sandbox_name TEXT NOT NULL,
    team TEXT NOT NULL,
    project TEXT NOT NULL,
    node TEXT NOT NULL,
    -- The run that the create made: when it fails to launch, the sandbox goes with it.
    first BIGINT NOT NULL,
    status TEXT NOT NULL,
    generation BIGINT NOT NULL,
    config TEXT NOT NULL,
    timeout_ms BIGINT NOT NULL,
    source_snapshot_id TEXT,
    id_range BIGINT NOT NULL,
    reason TEXT,
    requested_at BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    started_at BIGINT,
    requested_stop_at BIGINT,
    stopped_at BIGINT,
    aborted_at BIGINT,
    snapshotted_at BIGINT,
    active_cpu_ms BIGINT,
    -- The intent to keep the file system: which snapshot, and how.
    closing_snapshot_id TEXT,
    closing_automatic BIGINT NOT NULL,
    closing_expiration_ms BIGINT NOT NULL,
    -- Nothing of it is left on its node, and its id range is free.
    settled BIGINT NOT NULL
);
CREATE INDEX sessions_sandbox ON sessions (sandbox_id);
CREATE INDEX sessions_created ON sessions (team, project, created_at, id);
CREATE UNIQUE INDEX sessions_id_range ON sessions (node, id_range) WHERE settled = 0;

CREATE TABLE commands (
    id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL REFERENCES sessions (id),
    name TEXT NOT NULL,
    args TEXT NOT NULL,
    cwd TEXT NOT NULL,
    attach_stdin BIGINT NOT NULL,
    started_at BIGINT NOT NULL,
    ended BIGINT NOT NULL,
    exit_code BIGINT,
    duration_ms BIGINT,
    reason TEXT,
    idempotency_key TEXT
);
CREATE INDEX commands_session ON commands (session_id, id);
CREATE INDEX commands_open ON commands (session_id) WHERE ended = 0;
CREATE UNIQUE INDEX commands_idempotency_key ON commands (session_id, idempotency_key);

CREATE TABLE snapshots (
    id TEXT PRIMARY KEY,
    team TEXT NOT NULL,
    project TEXT NOT NULL,
    node TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    sandbox_name TEXT NOT NULL,
    source_session_id TEXT NOT NULL,
    status TEXT NOT NULL,
    image TEXT NOT NULL,
    runtime TEXT NOT NULL,
    region TEXT NOT NULL,
    size_bytes BIGINT NOT NULL,
    automatic BIGINT NOT NULL,
    parent_id TEXT,
    expiration_ms BIGINT NOT NULL,
    expires_at BIGINT,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    last_used_at BIGINT
);
CREATE INDEX snapshots_created ON snapshots (team, project, created_at, id);
CREATE INDEX snapshots_sandbox ON snapshots (sandbox_id, created_at);
CREATE INDEX snapshots_parent ON snapshots (parent_id);
CREATE INDEX snapshots_expiry ON snapshots (status, expires_at);

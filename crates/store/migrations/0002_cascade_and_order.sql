-- A sandbox, session, route or tag takes what belongs to it along when it goes (one statement, and no
-- row that is written beside it stays behind), and text is ordered byte by byte on both databases:
-- "BINARY" is SQLite's own order, and made of "C" in PostgreSQL before this runs. SQLite cannot alter
-- either, so the tables are made anew.

CREATE TABLE old_sandboxes AS SELECT * FROM sandboxes;
CREATE TABLE old_sandbox_tags AS SELECT * FROM sandbox_tags;
CREATE TABLE old_routes AS SELECT * FROM routes;
CREATE TABLE old_sessions AS SELECT * FROM sessions;
CREATE TABLE old_commands AS SELECT * FROM commands;
CREATE TABLE old_snapshots AS SELECT * FROM snapshots;
DROP TABLE commands;
DROP TABLE sessions;
DROP TABLE routes;
DROP TABLE sandbox_tags;
DROP TABLE sandboxes;
DROP TABLE snapshots;

CREATE TABLE sandboxes (
    id TEXT COLLATE "BINARY" PRIMARY KEY,
    team TEXT COLLATE "BINARY" NOT NULL,
    project TEXT COLLATE "BINARY" NOT NULL,
    name TEXT COLLATE "BINARY" NOT NULL,
    ephemeral BIGINT NOT NULL,
    persistent BIGINT NOT NULL,
    config TEXT NOT NULL,
    current_session_id TEXT COLLATE "BINARY" NOT NULL,
    current_snapshot_id TEXT COLLATE "BINARY",
    status TEXT NOT NULL,
    status_updated_at BIGINT NOT NULL,
    generation BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    total_active_cpu_ms BIGINT NOT NULL,
    total_duration_ms BIGINT NOT NULL,
    create_key TEXT COLLATE "BINARY",
    deleting BIGINT NOT NULL
);
CREATE UNIQUE INDEX sandboxes_name ON sandboxes (team, project, name);
CREATE UNIQUE INDEX sandboxes_create_key ON sandboxes (team, project, create_key);
CREATE INDEX sandboxes_created ON sandboxes (created_at, id);
CREATE INDEX sandboxes_snapshot ON sandboxes (current_snapshot_id);
INSERT INTO sandboxes (
    id, team, project, name, ephemeral, persistent, config, current_session_id, current_snapshot_id,
    status, status_updated_at, generation, created_at, updated_at, total_active_cpu_ms,
    total_duration_ms, create_key, deleting
) SELECT
    id, team, project, name, ephemeral, persistent, config, current_session_id, current_snapshot_id,
    status, status_updated_at, generation, created_at, updated_at, total_active_cpu_ms,
    total_duration_ms, create_key, deleting
FROM old_sandboxes;
DROP TABLE old_sandboxes;

CREATE TABLE sandbox_tags (
    sandbox_id TEXT COLLATE "BINARY" NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    key TEXT COLLATE "BINARY" NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, key)
);
INSERT INTO sandbox_tags (
    sandbox_id, key, value
) SELECT
    sandbox_id, key, value
FROM old_sandbox_tags;
DROP TABLE old_sandbox_tags;

CREATE TABLE routes (
    subdomain TEXT COLLATE "BINARY" PRIMARY KEY,
    sandbox_id TEXT COLLATE "BINARY" NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    port BIGINT NOT NULL
);
CREATE UNIQUE INDEX routes_sandbox ON routes (sandbox_id, port);
INSERT INTO routes (
    subdomain, sandbox_id, port
) SELECT
    subdomain, sandbox_id, port
FROM old_routes;
DROP TABLE old_routes;

CREATE TABLE sessions (
    id TEXT COLLATE "BINARY" PRIMARY KEY,
    sandbox_id TEXT COLLATE "BINARY" NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    sandbox_name TEXT COLLATE "BINARY" NOT NULL,
    team TEXT COLLATE "BINARY" NOT NULL,
    project TEXT COLLATE "BINARY" NOT NULL,
    node TEXT COLLATE "BINARY" NOT NULL,
    first BIGINT NOT NULL,
    status TEXT NOT NULL,
    generation BIGINT NOT NULL,
    config TEXT NOT NULL,
    timeout_ms BIGINT NOT NULL,
    source_snapshot_id TEXT COLLATE "BINARY",
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
    closing_snapshot_id TEXT COLLATE "BINARY",
    closing_automatic BIGINT NOT NULL,
    closing_expiration_ms BIGINT NOT NULL,
    settled BIGINT NOT NULL
);
CREATE INDEX sessions_sandbox ON sessions (sandbox_id);
CREATE INDEX sessions_created ON sessions (team, project, created_at, id);
CREATE UNIQUE INDEX sessions_id_range ON sessions (node, id_range) WHERE settled = 0;
INSERT INTO sessions (
    id, sandbox_id, sandbox_name, team, project, node, first, status, generation, config,
    timeout_ms, source_snapshot_id, id_range, reason, requested_at, created_at, updated_at,
    started_at, requested_stop_at, stopped_at, aborted_at, snapshotted_at, active_cpu_ms,
    closing_snapshot_id, closing_automatic, closing_expiration_ms, settled
) SELECT
    id, sandbox_id, sandbox_name, team, project, node, first, status, generation, config,
    timeout_ms, source_snapshot_id, id_range, reason, requested_at, created_at, updated_at,
    started_at, requested_stop_at, stopped_at, aborted_at, snapshotted_at, active_cpu_ms,
    closing_snapshot_id, closing_automatic, closing_expiration_ms, settled
FROM old_sessions;
DROP TABLE old_sessions;

CREATE TABLE commands (
    id TEXT COLLATE "BINARY" PRIMARY KEY,
    session_id TEXT COLLATE "BINARY" NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    name TEXT COLLATE "BINARY" NOT NULL,
    args TEXT NOT NULL,
    cwd TEXT NOT NULL,
    attach_stdin BIGINT NOT NULL,
    started_at BIGINT NOT NULL,
    ended BIGINT NOT NULL,
    exit_code BIGINT,
    duration_ms BIGINT,
    reason TEXT,
    idempotency_key TEXT COLLATE "BINARY"
);
CREATE INDEX commands_session ON commands (session_id, id);
CREATE INDEX commands_open ON commands (session_id) WHERE ended = 0;
CREATE UNIQUE INDEX commands_idempotency_key ON commands (session_id, idempotency_key);
INSERT INTO commands (
    id, session_id, name, args, cwd, attach_stdin, started_at, ended, exit_code, duration_ms,
    reason, idempotency_key
) SELECT
    id, session_id, name, args, cwd, attach_stdin, started_at, ended, exit_code, duration_ms,
    reason, idempotency_key
FROM old_commands;
DROP TABLE old_commands;

CREATE TABLE snapshots (
    id TEXT COLLATE "BINARY" PRIMARY KEY,
    team TEXT COLLATE "BINARY" NOT NULL,
    project TEXT COLLATE "BINARY" NOT NULL,
    node TEXT COLLATE "BINARY" NOT NULL,
    sandbox_id TEXT COLLATE "BINARY" NOT NULL,
    sandbox_name TEXT COLLATE "BINARY" NOT NULL,
    source_session_id TEXT COLLATE "BINARY" NOT NULL,
    status TEXT NOT NULL,
    image TEXT NOT NULL,
    runtime TEXT NOT NULL,
    region TEXT NOT NULL,
    size_bytes BIGINT NOT NULL,
    automatic BIGINT NOT NULL,
    parent_id TEXT COLLATE "BINARY",
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
INSERT INTO snapshots (
    id, team, project, node, sandbox_id, sandbox_name, source_session_id, status, image, runtime,
    region, size_bytes, automatic, parent_id, expiration_ms, expires_at, created_at, updated_at,
    last_used_at
) SELECT
    id, team, project, node, sandbox_id, sandbox_name, source_session_id, status, image, runtime,
    region, size_bytes, automatic, parent_id, expiration_ms, expires_at, created_at, updated_at,
    last_used_at
FROM old_snapshots;
DROP TABLE old_snapshots;

-- Boxes: terminals, routes that are open to everybody, principals and their tokens.

-- It has a terminal.
ALTER TABLE commands ADD COLUMN tty BIGINT NOT NULL DEFAULT 0;
-- Name of the terminal session that it is; of those that run, unique in a session.
ALTER TABLE commands ADD COLUMN terminal TEXT COLLATE "BINARY";
CREATE UNIQUE INDEX commands_terminal ON commands (session_id, terminal) WHERE ended = 0;

-- 1: open to everybody.
ALTER TABLE routes ADD COLUMN public BIGINT NOT NULL DEFAULT 0;
-- Grows when links and cookies of the route are revoked: they carry it.
ALTER TABLE routes ADD COLUMN epoch BIGINT NOT NULL DEFAULT 0;

-- The token itself is never here: `hash` is of its secret half.
CREATE TABLE tokens (
    id TEXT COLLATE "BINARY" PRIMARY KEY,
    name TEXT COLLATE "BINARY" NOT NULL,
    hash TEXT COLLATE "BINARY" NOT NULL,
    -- A JSON list of TEAM/PROJECT and TEAM/*; '*' is every namespace.
    namespaces TEXT NOT NULL,
    -- A JSON list of verbs.
    verbs TEXT NOT NULL,
    -- Which token made it; '' is the engine's own.
    made_by TEXT COLLATE "BINARY" NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT,
    revoked_at BIGINT,
    last_used_at BIGINT
);
-- A name is free again when its token is revoked.
CREATE UNIQUE INDEX tokens_name ON tokens (name) WHERE revoked_at IS NULL;

-- Public keys that may open SSH connections, each for a principal.
CREATE TABLE ssh_keys (
    fingerprint TEXT COLLATE "BINARY" PRIMARY KEY,
    name TEXT COLLATE "BINARY" NOT NULL,
    public_key TEXT NOT NULL,
    -- The token whose rights it has; '' is the engine's own. Goes with that token.
    token_id TEXT COLLATE "BINARY" NOT NULL,
    created_at BIGINT NOT NULL,
    last_used_at BIGINT
);
CREATE INDEX ssh_keys_token ON ssh_keys (token_id);

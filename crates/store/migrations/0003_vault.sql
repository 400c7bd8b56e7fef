-- Secrets at rest. What is in `sealed` is AES-256-GCM in text form (see vault.rs), bound to the row that
-- it is in; nothing else here is secret. Neither table refers to a sandbox: values are shared by forks,
-- and a reconciler removes those that no policy names any more.

CREATE TABLE secrets (
    team TEXT COLLATE "BINARY" NOT NULL,
    project TEXT COLLATE "BINARY" NOT NULL,
    name TEXT COLLATE "BINARY" NOT NULL,
    kind TEXT NOT NULL,
    sealed TEXT NOT NULL,
    version BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (team, project, name)
);

-- Header values of policies, as templates that may name secrets.
CREATE TABLE policy_values (
    id TEXT COLLATE "BINARY" PRIMARY KEY,
    team TEXT COLLATE "BINARY" NOT NULL,
    sealed TEXT NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE INDEX policy_values_team ON policy_values (team);
CREATE INDEX policy_values_created ON policy_values (created_at);

-- Keys that identity tokens are signed with, the newest one first in use.
CREATE TABLE issuer_keys (
    id TEXT COLLATE "BINARY" PRIMARY KEY,
    sealed TEXT NOT NULL,
    created_at BIGINT NOT NULL
);

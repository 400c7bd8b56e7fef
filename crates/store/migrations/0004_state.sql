-- State outside of the worker: labels of snapshots, drives and who has them mounted.

-- A JSON object of texts.
ALTER TABLE snapshots ADD COLUMN labels TEXT NOT NULL DEFAULT '{}';
-- Why it was taken, when neither a user nor a stop asked for it: 'fork' (what a live fork starts from; goes
-- when no sandbox would start from it any more), 'rollback' (the state before one). '' for all others.
ALTER TABLE snapshots ADD COLUMN purpose TEXT NOT NULL DEFAULT '';
-- How long its sandbox stood still for it, µs; 0 when it was stopped.
ALTER TABLE snapshots ADD COLUMN stall_us BIGINT NOT NULL DEFAULT 0;
-- 1 when size_bytes is the result of a walk; 0 while it is an estimate and the walk is still to be done.
ALTER TABLE snapshots ADD COLUMN measured BIGINT NOT NULL DEFAULT 1;
CREATE INDEX snapshots_purpose ON snapshots (purpose, status);
CREATE INDEX snapshots_measured ON snapshots (measured, status);
-- sandboxes.deleting has one more word: 3, one of several that a call makes and has not answered yet.

CREATE TABLE drives (
    id TEXT COLLATE "BINARY" PRIMARY KEY,
    team TEXT COLLATE "BINARY" NOT NULL,
    project TEXT COLLATE "BINARY" NOT NULL,
    name TEXT COLLATE "BINARY" NOT NULL,
    node TEXT COLLATE "BINARY" NOT NULL,
    region TEXT NOT NULL,
    max_bytes BIGINT NOT NULL,
    -- Somebody had it mounted for writing: before that there is nothing to take a view of.
    initialized BIGINT NOT NULL,
    parent_id TEXT COLLATE "BINARY",
    root_id TEXT COLLATE "BINARY",
    -- The one writer. It lets go by being settled; `fence` grows with each writer.
    writer_session_id TEXT COLLATE "BINARY",
    fence BIGINT NOT NULL,
    generation BIGINT NOT NULL,
    -- The data is there (0: it is being made) and is not on its way out (2: it is).
    state BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX drives_name ON drives (team, project, name);
CREATE INDEX drives_created ON drives (team, project, created_at, id);
CREATE INDEX drives_writer ON drives (writer_session_id);

-- What a session has mounted, the writer's mount included; goes when the session is settled.
CREATE TABLE drive_mounts (
    session_id TEXT COLLATE "BINARY" NOT NULL,
    path TEXT COLLATE "BINARY" NOT NULL,
    drive_id TEXT COLLATE "BINARY" NOT NULL,
    mode TEXT NOT NULL,
    -- What is mounted: the drive's own data, or the private copy of it that the session has.
    volume TEXT COLLATE "BINARY" NOT NULL,
    -- 0 being attached, 1 there, 2 being detached, 3 being detached by force.
    state BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (session_id, path)
);
CREATE INDEX drive_mounts_drive ON drive_mounts (drive_id);

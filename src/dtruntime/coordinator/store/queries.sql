-- name: create_records
CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL,
    job TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (kind, job, key)
) WITHOUT ROWID

-- name: create_journal
CREATE TABLE IF NOT EXISTS journal (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    job TEXT NOT NULL,
    kind TEXT NOT NULL,
    fields BLOB NOT NULL
)

-- name: create_quarantine
CREATE TABLE IF NOT EXISTS quarantine (
    kind TEXT NOT NULL,
    job TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    problem TEXT NOT NULL
)

-- name: create_meta
CREATE TABLE IF NOT EXISTS meta (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID

-- name: next_term
INSERT INTO meta (name, value) VALUES ('term', 1)
ON CONFLICT (name) DO UPDATE SET value = value + 1
RETURNING value

-- name: all_records
SELECT kind, job, key, value FROM records WHERE kind <> ?

-- name: one_record
SELECT value FROM records WHERE kind = ? AND job = ? AND key = ?

-- name: put_record
INSERT INTO records (kind, job, key, value) VALUES (?, ?, ?, ?)
ON CONFLICT (kind, job, key) DO UPDATE SET value = excluded.value

-- name: delete_record
DELETE FROM records WHERE kind = ? AND job = ? AND key = ?

-- name: quarantine_record
INSERT INTO quarantine (kind, job, key, value, problem) VALUES (?, ?, ?, ?, ?)

-- name: all_events
SELECT id, at, job, kind, fields FROM journal ORDER BY id

-- name: add_event
INSERT OR REPLACE INTO journal (id, at, job, kind, fields) VALUES (?, ?, ?, ?, ?)

-- name: trim_journal
DELETE FROM journal WHERE id <= ?

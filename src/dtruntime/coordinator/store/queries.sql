-- name: create_records
CREATE TABLE records (
    kind TEXT NOT NULL,
    job TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    digest INTEGER NOT NULL,
    PRIMARY KEY (kind, job, key)
) WITHOUT ROWID

-- name: create_journal
CREATE TABLE journal (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    job TEXT NOT NULL,
    kind TEXT NOT NULL,
    fields BLOB NOT NULL,
    digest INTEGER NOT NULL
)

-- name: create_quarantine
CREATE TABLE quarantine (
    kind TEXT NOT NULL,
    job TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    problem TEXT NOT NULL
)

-- name: create_summary
CREATE TABLE summary (
    id INTEGER PRIMARY KEY,
    value BLOB NOT NULL,
    digest INTEGER NOT NULL
)

-- name: tables
SELECT name, sql FROM sqlite_master

-- name: put_summary
INSERT OR REPLACE INTO summary (id, value, digest) VALUES (1, ?, ?)

-- name: all_summaries
SELECT value, digest FROM summary

-- name: all_records
SELECT kind, job, key, value, digest FROM records

-- name: records_of_other_kinds
SELECT kind, job, key, value, digest FROM records WHERE kind <> ?

-- name: one_record
SELECT value, digest FROM records WHERE kind = ? AND job = ? AND key = ?

-- name: digest_of_record
SELECT digest FROM records WHERE kind = ? AND job = ? AND key = ?

-- name: put_record
INSERT INTO records (kind, job, key, value, digest) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (kind, job, key) DO UPDATE SET value = excluded.value, digest = excluded.digest

-- name: delete_record
DELETE FROM records WHERE kind = ? AND job = ? AND key = ? RETURNING digest

-- name: delete_job
DELETE FROM records WHERE kind = ? AND job = ? RETURNING digest

-- name: quarantine_record
INSERT INTO quarantine (kind, job, key, value, problem) VALUES (?, ?, ?, ?, ?)

-- name: all_events
SELECT id, at, job, kind, fields, digest FROM journal ORDER BY id

-- name: add_event
INSERT OR REPLACE INTO journal (id, at, job, kind, fields, digest) VALUES (?, ?, ?, ?, ?, ?)

-- name: delete_event
DELETE FROM journal WHERE id = ?

-- name: forget_event
DELETE FROM journal WHERE id = ? RETURNING digest

-- name: schema_1_tables
SELECT name FROM sqlite_master WHERE name IN ('records', 'journal', 'quarantine', 'meta')

-- name: schema_1_records
SELECT kind, job, key, value FROM schema_1_records

-- name: schema_1_events
SELECT id, at, job, kind, fields FROM schema_1_journal ORDER BY id

-- name: schema_1_quarantine
INSERT INTO quarantine SELECT kind, job, key, value, problem FROM schema_1_quarantine

-- name: schema_1_term
SELECT value FROM schema_1_meta WHERE name = 'term'

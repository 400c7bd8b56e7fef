# shellcheck shell=bash
# A private PostgreSQL server for tests: Debian's program, in a folder of its own, on a Unix socket, as another
# user than root. Sourced by script/test after script/lib.sh, never run.

# Folder with initdb and postgres, of the newest version that is installed.
postgres_bin() { find /usr/lib/postgresql -path '*/bin/initdb' -printf '%h\n' 2>/dev/null | sort -V | tail -n 1; }

need_postgres() {
  [ -z "$(postgres_bin)" ] || command -v psql >/dev/null 2>&1 || need_packages psql=postgresql-client
  [ -z "$(postgres_bin)" ] || return 0
  # Debian's package would start a server of its own: it is told not to, once, where nobody decided before.
  if [ ! -e /etc/postgresql-common/createcluster.conf ]; then
    need_packages /usr/share/postgresql-common/createcluster.conf=postgresql-common
    sed -i 's/^#\{0,1\} *create_main_cluster *=.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf
  fi
  need_packages /usr/lib/postgresql/any=postgresql
}

# start_postgres: sets postgres_url, postgres_pid and postgres_folder. The order of its texts is a language's, not
# the bytes': what depends on it shows. It ends with this shell, however that ends.
start_postgres() {
  local bin
  bin=$(postgres_bin)
  postgres_folder=$(mktemp -d /tmp/bivouac-postgres.XXXXXX) || return 1
  chown postgres: "$postgres_folder"
  local as=(setpriv --reuid postgres --regid postgres --clear-groups --pdeathsig INT --)
  if ! (cd / && "${as[@]}" "$bin/initdb" -D "$postgres_folder/data" --no-sync --auth=trust --username=postgres \
    --encoding=UTF8 --locale=C.UTF-8 --locale-provider=icu --icu-locale=en) >"$postgres_folder/log" 2>&1 </dev/null; then
    tail -n 5 "$postgres_folder/log" >&2
    stop_postgres
    return 1
  fi
  (cd / && exec "${as[@]}" "$bin/postgres" -D "$postgres_folder/data" -k "$postgres_folder" -c listen_addresses= \
    -c fsync=off -c full_page_writes=off -c wal_level=minimal -c max_wal_senders=0 -c max_connections=300 \
    -c shared_buffers=64MB -c autovacuum=off) >>"$postgres_folder/log" 2>&1 </dev/null &
  postgres_pid=$!
  postgres_url="postgres:///postgres?host=$postgres_folder&user=postgres"
  local _
  for _ in $(seq 300); do
    psql --no-psqlrc --quiet --dbname "$postgres_url" --command 'SELECT 1' >/dev/null 2>&1 && return 0
    kill -0 "$postgres_pid" 2>/dev/null || break
    sleep 0.1
  done
  tail -n 5 "$postgres_folder/log" >&2
  stop_postgres
  return 1
}

# stop_postgres: ends it by its pid and removes its folder; nothing when none was started.
stop_postgres() {
  if [ -n "${postgres_pid:-}" ]; then
    kill -INT "$postgres_pid" 2>/dev/null
    ( sleep 20; kill -KILL "$postgres_pid" ) >/dev/null 2>&1 &
    local watch=$!
    wait "$postgres_pid" 2>/dev/null
    kill "$watch" 2>/dev/null
    wait "$watch" 2>/dev/null
  fi
  case "${postgres_folder:-}" in /tmp/bivouac-postgres.*) rm -rf "$postgres_folder" ;; esac
  postgres_pid='' postgres_folder='' postgres_url=''
}

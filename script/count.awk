# Reads the output of `cargo test` (libtest) and of `node --test` (TAP or spec form) and prints what script/test adds up:
#   passed N
#   failed N
#   skip NAME        one line for each test that did not run
#   problem TEXT     one line for each thing that makes the output untrustworthy: counts as a failure
# Invariant: a runner that died, and a skip without a name, can never look like success.

{ gsub(/\033\[[0-9;]*m/, "") }

# cargo announces each test executable; each must then close with one result line.
/^ *Running (unittests |tests\/|benches\/|[^ ]+\.rs )/ { executables++ }
/^test result: / {
  results++
  for (i = 3; i < NF; i++) {
    if ($(i + 1) ~ /^passed;/) passed += $i
    if ($(i + 1) ~ /^failed;/) failed += $i
    if ($(i + 1) ~ /^ignored;/) skips += $i
  }
}
/^test .* \.\.\. ignored/ { name = $0; sub(/^test /, "", name); sub(/ \.\.\. ignored.*/, "", name); names[++named] = name }

# node: "# pass 3" (TAP) or "ℹ pass 3" (spec).
/^(#|ℹ) (tests|pass|fail|cancelled|skipped|todo) [0-9]+$/ {
  if ($2 == "tests") summaries++
  if ($2 == "pass") passed += $3
  if ($2 == "fail" || $2 == "cancelled") failed += $3
  if ($2 == "skipped") skips += $3
  if ($2 == "todo" && $3 > 0) problems[++troubles] = $3 " tests are marked todo: finish them or list them as skips"
}
/^ *ok [0-9]+ - .* # SKIP/ { name = $0; sub(/^ *ok [0-9]+ - /, "", name); sub(/ # SKIP.*/, "", name); names[++named] = name }
/^ *﹣ / { name = $0; sub(/^ *﹣ /, "", name); sub(/ \([0-9.]+ms\).*/, "", name); sub(/ # .*/, "", name); names[++named] = name }

END {
  if (results < executables) problems[++troubles] = (executables - results) " of " executables " test executables died before their result"
  if (!results && !summaries) problems[++troubles] = "no test runner closed its output"
  if (named < skips) problems[++troubles] = (skips - named) " skipped tests have no name in the output"
  printf "passed %d\nfailed %d\n", passed, failed
  for (i = 1; i <= named; i++) print "skip " names[i]
  for (i = 1; i <= troubles; i++) print "problem " problems[i]
}

//! What a sandbox may do to the kernel: its root has fewer rights than it looks.

use crate::isolation::perl;
use crate::sandbox;

const ENOSYS: &str = "38";

#[tokio::test]
async fn calls_that_are_not_there() {
    let (_server, sandbox) = sandbox("syscalls").await;
    let calls = [
        ("bpf", 321),
        ("keyctl", 250),
        ("add_key", 248),
        ("request_key", 249),
        ("perf_event_open", 298),
        ("userfaultfd", 323),
        ("init_module", 175),
        ("finit_module", 313),
        ("delete_module", 176),
        ("kexec_load", 246),
        ("kexec_file_load", 320),
        ("io_uring_setup", 425),
        ("io_uring_enter", 426),
        ("io_uring_register", 427),
    ];
    for (name, number) in calls {
        let script = format!(
            "my $r = syscall({number}, 0, 0, 0, 0, 0); print $r == -1 ? $! + 0 : \"allowed\""
        );
        assert_eq!(perl(&sandbox, &script).await, ENOSYS, "{name}");
    }
    // Positive control: the same way of asking finds a call that is there.
    assert_eq!(perl(&sandbox, "print syscall(39) == $$ ? 'getpid' : 'no'").await, "getpid");
}

#[tokio::test]
async fn socket_families_that_are_refused() {
    let (_server, sandbox) = sandbox("families").await;
    let families = [
        ("AF_VSOCK", 40, 1, 0),
        ("AF_PACKET", 17, 3, 0),
        ("AF_PACKET, cooked", 17, 2, 0),
        ("AF_NETLINK, NETFILTER", 16, 3, 12),
        ("AF_ALG", 38, 5, 0),
        ("AF_BLUETOOTH", 31, 3, 1),
        ("AF_XDP", 44, 3, 0),
        ("AF_RDS", 21, 5, 0),
        ("AF_TIPC", 30, 1, 0),
        ("AF_CAN", 29, 3, 1),
        ("AF_KEY", 15, 3, 2),
    ];
    for (name, family, kind, protocol) in families {
        let script =
            format!("print socket(my $s, {family}, {kind}, {protocol}) ? 'opened' : 'refused'");
        assert_eq!(perl(&sandbox, &script).await, "refused", "{name}");
        let script = format!(
            "my $two = pack('x8'); \
             print syscall(53, {family}, {kind}, {protocol}, $two) == 0 ? 'opened' : 'refused'"
        );
        assert_eq!(perl(&sandbox, &script).await, "refused", "{name}, a pair");
    }
    let pair = "my $two = pack('x8'); print syscall(53, 1, 1, 0, $two) == 0 ? 'opened' : $!";
    assert_eq!(perl(&sandbox, pair).await, "opened", "positive control of the pairs");
    for (name, family, kind, protocol) in [
        ("AF_UNIX", 1, 1, 0),
        ("AF_INET", 2, 1, 0),
        ("AF_INET6", 10, 2, 0),
        ("AF_NETLINK, ROUTE", 16, 3, 0),
    ] {
        let script = format!("print socket(my $s, {family}, {kind}, {protocol}) ? 'opened' : $!");
        assert_eq!(perl(&sandbox, &script).await, "opened", "{name}: programs need it");
    }
    // The old door to socket(2) of 32-bit programs, and x32 calls, do not lead around the filter.
    let x32 = "my $r = syscall(0x40000000 | 321, 0, 0, 0); print $r == -1 ? 'refused' : 'allowed'";
    assert_eq!(perl(&sandbox, x32).await, "refused");
}

#[tokio::test]
async fn root_cannot_reach_the_kernel() {
    let (_server, sandbox) = sandbox("kernel").await;
    let attempts = [
        "mknod /tmp/disk b 7 0",
        "mknod /tmp/mem c 1 1",
        "echo b > /proc/sysrq-trigger",
        "echo '|/bin/sh' > /proc/sys/kernel/core_pattern",
        "echo 1 > /proc/sys/kernel/panic",
        "echo 1 > /proc/sys/vm/drop_caches",
        "echo x > /sys/kernel/uevent_helper",
        "cat /proc/kcore | head -c 1 | grep -q .",
        "head -c 1 /dev/mem",
        "head -c 1 /dev/kmsg",
        "dmesg",
        "mount -t btrfs /dev/loop0 /mnt",
        "mount -t debugfs d /mnt",
        "mount -t securityfs s /mnt",
        "mount -t bpf b /mnt",
        "swapon /dev/zero",
        "date -s 2000-01-01",
        "hwclock -w",
        "nice -n -20 true && chrt -f 50 true",
        "echo 0 > /proc/self/oom_score_adj && echo -1000 > /proc/self/oom_score_adj",
        "chroot /proc/1/root /bin/sh -c 'test -e /proc/1/root/../pool'",
    ];
    for attempt in attempts {
        let ran = sandbox.sudo(attempt).await;
        assert_ne!(ran.exit, Some(0), "{attempt} worked: {}", ran.out());
    }
    // Capabilities: what is never needed is not even in the bounding set.
    let bound = sandbox.sudo("awk '/CapBnd/ { print $2 }' /proc/self/status").await.good();
    let bound = u64::from_str_radix(&bound, 16).unwrap();
    for (name, bit) in [
        ("SYS_MODULE", 16),
        ("SYS_RAWIO", 17),
        ("SYS_BOOT", 22),
        ("SYS_TIME", 25),
        ("MAC_OVERRIDE", 32),
        ("MAC_ADMIN", 33),
        ("SYSLOG", 34),
        ("PERFMON", 38),
        ("BPF", 39),
    ] {
        assert_eq!(bound >> bit & 1, 0, "CAP_{name} is in the bounding set {bound:#x}");
    }
    for (name, bit) in
        [("CHOWN", 0), ("DAC_OVERRIDE", 1), ("KILL", 5), ("SETUID", 7), ("NET_BIND_SERVICE", 10)]
    {
        assert_eq!(bound >> bit & 1, 1, "CAP_{name} is missing: {bound:#x}");
    }
    // The default user has none at all.
    let own = sandbox
        .sh("awk '/CapEff|CapPrm|CapInh|CapAmb/ { print $2 }' /proc/self/status | sort -u")
        .await;
    assert_eq!(own.good(), "0000000000000000");
    let seccomp = sandbox.sh("awk '/^Seccomp:/ { print $2 }' /proc/self/status").await.good();
    assert_eq!(seccomp, "2", "no filter is in force");
}

#[tokio::test]
async fn control_groups_cannot_be_changed() {
    let (_server, sandbox) = sandbox("cgroups").await;
    let find = "find /sys/fs/cgroup -name cgroup.procs -o -name 'memory.*' -o -name 'pids.max' -o -name 'cgroup.kill' 2>/dev/null";
    let write =
        format!("for f in $({find}); do ( echo 0 > $f ) 2>/dev/null && echo $f; done; true");
    assert_eq!(sandbox.sudo(&write).await.good(), "");
    let path = sandbox.run(&["cat", "/proc/self/cgroup"]).await.good();
    for line in
        path.lines().filter(|l| l.starts_with("0::") || l.contains("memory") || l.contains("pids"))
    {
        assert!(
            !line.contains("sbx_") && !line.contains("bivouac"),
            "the host's path shows: {line}"
        );
    }
}

#[tokio::test]
async fn descriptors_of_the_outside_do_not_leak_in() {
    let (_server, sandbox) = sandbox("descriptors").await;
    let open = sandbox.sh("ls -l /proc/self/fd | sed 's/.* -> //' | grep -v '^total'").await.good();
    for line in open.lines() {
        assert!(
            line.starts_with("pipe:")
                || line.starts_with("/dev/null")
                || line.starts_with("/proc/"),
            "an unexpected descriptor: {line}\n{open}"
        );
    }
    assert!(open.lines().count() <= 5, "{open}");
    // Init's own descriptors are not to be had, not even for root.
    let steal = "for f in /proc/1/fd/*; do cat <$f >/dev/null 2>&1 & p=$!; sleep 0.05; kill $p 2>/dev/null && echo $f; done; \
                 ls /proc/1/fd 2>/dev/null; true";
    assert_eq!(sandbox.sudo(steal).await.good(), "", "root can open what init holds");
    let attach = "my $r = syscall(101, 16, 1, 0, 0); print $r == -1 ? 'refused' : 'attached'";
    assert_eq!(perl(&sandbox, attach).await, "refused", "ptrace of init");
}

#[tokio::test]
async fn sandboxes_of_programs_work_inside() {
    let (_server, sandbox) = sandbox("nested").await;
    // What bubblewrap, browsers and agents' own sandboxes do.
    let nested = "unshare -U -r -m -p -f -u -i -n --mount-proc sh -c 'id -u; echo $$; ls /proc | grep -c \"^[0-9]\"'";
    let ran = sandbox.sh(nested).await;
    let text = ran.good();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!((lines[0], lines[1]), ("0", "1"), "{text}");
    // And what they must not gain: the calls that are not there are not there in them either.
    let script = "unshare -U -r -n perl -e 'my $r = syscall(321, 0, 0, 0); print $r == -1 ? $! + 0 : q(allowed)'";
    assert_eq!(sandbox.sh(script).await.good(), ENOSYS);
    let mount = "unshare -U -r -m sh -c 'mount -t tmpfs t /mnt && mount --rbind /etc /mnt && test -e /mnt/passwd && echo mine'";
    assert_eq!(sandbox.sh(mount).await.good(), "mine");
}

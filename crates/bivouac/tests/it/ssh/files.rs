//! Files: sftp, scp, rsync, git.

use super::kit::{Desk, noise, run, run_with};
use crate::sandbox;

#[tokio::test]
async fn sftp_does_what_it_is_told() {
    let (server, box_) = sandbox("ssh-sftp").await;
    let desk = Desk::new(&server, "ssh-sftp");
    let host = format!("{}.bivouac", box_.name);
    desk.ssh(&[&box_.name, "true"]).await.good();
    let bytes = noise(3 << 20);
    let local = desk.file("local", &bytes);
    std::os::unix::fs::PermissionsExt::set_mode(
        &mut std::fs::metadata(&local).unwrap().permissions(),
        0o640,
    );
    let (local, back) = (local.to_str().unwrap(), desk.path("back"));
    let back = back.to_str().unwrap();
    let batch = format!(
        "pwd\nput {local} a\nget a {back}\nrename a b\nln -s b link\nmkdir d\nput {local} d/c\nchmod 600 d/c\nln b hard\n\
         df\n-rm nothing\nls -la\nrm hard\ncd d\npwd\n"
    );
    let sftp = desk.open_ssh("sftp", &["-b", "-", &host]).await;
    let done = run_with(sftp, batch.as_bytes()).await;
    let text = done.good();
    assert!(text.contains("Remote working directory: /vercel/sandbox\n"), "{text}");
    assert!(text.contains("/vercel/sandbox/d"), "{text}");
    assert!(text.contains("vercel-sandbox") && text.contains("link"), "{text}");
    assert!(std::fs::read(back).unwrap() == bytes);
    let seen = box_
        .sh("stat -c '%U:%G %a %s' b d/c; readlink link; ls; test ! -e hard && sha256sum < b")
        .await
        .good();
    let mut lines = seen.lines();
    assert_eq!(lines.next().unwrap(), format!("vercel-sandbox:vercel-sandbox 644 {}", bytes.len()));
    assert_eq!(lines.next().unwrap(), format!("vercel-sandbox:vercel-sandbox 600 {}", bytes.len()));
    assert_eq!(lines.next().unwrap(), "b");
    // What the user may not, SFTP may not; root may.
    let sftp = desk.open_ssh("sftp", &["-b", "-", &host]).await;
    let refused = run_with(sftp, format!("put {local} /etc/mine\n").as_bytes()).await;
    assert!(refused.code != Some(0) && refused.err.contains("ermission denied"), "{}", refused.err);
    let sftp = desk.open_ssh("sftp", &["-b", "-", "-o", "User=root", &host]).await;
    run_with(sftp, format!("put {local} /etc/mine\n").as_bytes()).await.good();
    assert_eq!(box_.sh("stat -c %U /etc/mine").await.good(), "root");
    // Nothing of init's is to be had by the server's own descriptors.
    let sftp = desk.open_ssh("sftp", &["-b", "-", &host]).await;
    let listed = run_with(sftp, b"ls -1 /proc/self/fd\n").await;
    let numbers = listed.text().lines().filter(|line| line.contains("/fd/")).count();
    assert!(numbers <= 4, "{}", listed.text());
}

#[tokio::test]
async fn scp_copies_trees_and_keeps_times() {
    let (server, box_) = sandbox("ssh-scp").await;
    let desk = Desk::new(&server, "ssh-scp");
    desk.ssh(&[&box_.name, "true"]).await.good();
    std::fs::create_dir_all(desk.path("tree/sub")).unwrap();
    desk.file("tree/a", b"a");
    desk.file("tree/sub/b c", b"bc");
    let tree = desk.path("tree");
    let to = format!("{}.bivouac:", box_.name);
    run(desk.open_ssh("scp", &["-rp", tree.to_str().unwrap(), &to]).await).await.good();
    assert_eq!(box_.sh("cat tree/a 'tree/sub/b c'").await.good(), "abc");
    let back = desk.path("back");
    let from = format!("{}.bivouac:tree", box_.name);
    run(desk.open_ssh("scp", &["-rp", &from, back.to_str().unwrap()]).await).await.good();
    assert_eq!(std::fs::read(back.join("sub/b c")).unwrap(), b"bc");
    let time = |path: &std::path::Path| {
        std::os::unix::fs::MetadataExt::mtime(&std::fs::metadata(path).unwrap())
    };
    assert_eq!(time(&tree.join("a")), time(&back.join("a")));
}

#[tokio::test]
async fn rsync_and_git_work_over_it() {
    let (server, box_) = sandbox("ssh-tools").await;
    let desk = Desk::new(&server, "ssh-tools");
    desk.ssh(&[&box_.name, "true"]).await.good();
    let config = desk.config().await;
    std::fs::create_dir_all(desk.path("tree/sub")).unwrap();
    let bytes = noise(1 << 20);
    desk.file("tree/sub/x", &bytes);
    let by = format!("ssh -F {config}");
    let to = format!("{}.bivouac:copy/", box_.name);
    let tree = format!("{}/", desk.path("tree").display());
    let mut rsync = desk.command("rsync");
    rsync.args(["-a", "-e", &by, &tree, &to]);
    run(rsync).await.good();
    let there = desk.ssh(&[&box_.name, "cat copy/sub/x"]).await;
    assert!(there.out == bytes);
    // git: a repository inside is cloned, changed and pushed to.
    let setup = "git init -q -b main repo && cd repo && git config user.name x && git config user.email x@x \
                 && echo one > f && git add f && git commit -qm one && git checkout -q -b other";
    let _ = box_.sh(setup).await.good();
    let git = |args: &[&str]| {
        let mut command = desk.command("git");
        command
            .env("GIT_SSH_COMMAND", &by)
            .args(["-c", "user.name=x", "-c", "user.email=x@x"])
            .args(args);
        command
    };
    let (clone, from) = (desk.path("clone"), format!("{}.bivouac:repo", box_.name));
    let clone = clone.to_str().unwrap();
    run(git(&["clone", "-q", "-b", "main", &from, clone])).await.good();
    assert_eq!(std::fs::read(desk.path("clone/f")).unwrap(), b"one\n");
    desk.file("clone/f", b"two\n");
    run(git(&["-C", clone, "commit", "-qam", "two"])).await.good();
    run(git(&["-C", clone, "push", "-q", "origin", "main"])).await.good();
    assert_eq!(box_.sh("git -C repo show main:f").await.good(), "two");
}

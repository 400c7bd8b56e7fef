//! What a client has sent on one channel and nobody has taken yet.
//!
//! The library tops a channel's window up when data arrives, not when it is used, and hands data on by a queue that
//! stops the whole connection when it is full: then a program that waits until its output is read, while its input
//! waits for it, would stand still for ever. So data goes into a feed, which never blocks, and the windows are made
//! small while a feed is full ([`Feeds::window`]). Invariant: a client that keeps to its windows has a few MiB in
//! feeds at most, one that does not is cut off. Used by `handler` (in) and `pump` (out).

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use russh::ChannelId;
use tokio::sync::Notify;

/// Bytes that a client may send on a channel before it has to wait.
pub(super) const WINDOW: u32 = 1 << 20;
/// The window while a feed is full. The library wants one, so a stuck client sends two bytes at a time.
const TRICKLE: u32 = 2;
/// From so many bytes on a feed is full.
const FULL: usize = 512 << 10;
/// More than this nobody sends who keeps to his windows.
const TOO_MUCH: usize = 8 << 20;
/// More than this is not kept for all channels of a connection.
const TOO_MUCH_AT_ALL: usize = 64 << 20;
/// How long what a channel has brought may take to be handed on when it is gone.
const LAST_BYTES: Duration = Duration::from_secs(10);
/// How long the connection waits for a full feed before it looks after its other work.
const PAUSE: Duration = Duration::from_millis(20);
/// The same when the client only trickles.
const LONG_PAUSE: Duration = Duration::from_millis(100);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One channel's.
#[derive(Debug, Default)]
pub(super) struct Feed {
    state: Mutex<State>,
    come: Notify,
    room: Notify,
    over: Notify,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Bytes>,
    bytes: usize,
    /// No more comes.
    ended: bool,
    /// The channel is gone. What came before is still handed on.
    closed: bool,
    /// Nothing is.
    cut: bool,
}

impl Feed {
    fn push(&self, data: Bytes) -> usize {
        let mut state = locked(&self.state);
        if !state.closed && !state.ended && !data.is_empty() {
            state.bytes += data.len();
            state.queue.push_back(data);
        }
        let bytes = state.bytes;
        drop(state);
        self.come.notify_one();
        bytes
    }

    /// No more comes.
    fn end(&self) {
        locked(&self.state).ended = true;
        self.come.notify_one();
    }

    /// The channel is gone. A client that has nothing more to hear closes it right behind its last bytes, so those
    /// stay, but with `cut`.
    fn close(&self, cut: bool) {
        let mut state = locked(&self.state);
        state.closed = true;
        if cut {
            state.cut = true;
            state.queue.clear();
            state.bytes = 0;
        }
        drop(state);
        self.come.notify_one();
        self.room.notify_one();
        self.over.notify_waiters();
    }

    /// The next piece; `None` when no more comes. For one reader.
    pub(super) async fn next(&self) -> Option<Bytes> {
        loop {
            {
                let mut state = locked(&self.state);
                if let Some(data) = state.queue.pop_front() {
                    state.bytes -= data.len();
                    if state.bytes < FULL {
                        self.room.notify_one();
                    }
                    return Some(data);
                }
                if state.ended || state.closed || state.cut {
                    return None;
                }
            }
            self.come.notified().await;
        }
    }

    /// Takes all that still comes and uses it for nothing.
    pub(super) async fn discard(&self) {
        while self.next().await.is_some() {}
    }

    /// Answers when the channel is gone.
    pub(super) async fn closed(&self) {
        self.until(|state| state.closed).await;
    }

    /// Answers when what is left may not be handed on any more, or that takes too long.
    pub(super) async fn abandoned(&self) {
        self.closed().await;
        tokio::select! {
            () = tokio::time::sleep(LAST_BYTES) => {}
            () = self.until(|state| state.cut) => {}
        }
    }

    async fn until(&self, is_so: impl Fn(&State) -> bool) {
        loop {
            let over = self.over.notified();
            tokio::pin!(over);
            over.as_mut().enable();
            if is_so(&locked(&self.state)) {
                return;
            }
            over.await;
        }
    }

    fn bytes(&self) -> usize {
        locked(&self.state).bytes
    }
}

/// Those of all channels of a connection.
#[derive(Debug, Default)]
pub(super) struct Feeds {
    of: Mutex<HashMap<ChannelId, Arc<Feed>>>,
    over: AtomicBool,
}

/// The client sent more than its windows allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Flood;

impl Feeds {
    /// The feed of a channel, made when there is none.
    pub(super) fn of(&self, channel: ChannelId) -> Arc<Feed> {
        let mut feeds = locked(&self.of);
        let feed = Arc::clone(feeds.entry(channel).or_default());
        if self.over.load(Ordering::SeqCst) {
            feed.close(true);
        }
        feed
    }

    /// How many channels there are.
    pub(super) fn count(&self) -> usize {
        locked(&self.of).len()
    }

    /// Puts data into a channel's feed. When that is full, waits a moment for room.
    pub(super) async fn put(&self, channel: ChannelId, data: &[u8]) -> Result<(), Flood> {
        let Some(feed) = locked(&self.of).get(&channel).cloned() else { return Ok(()) };
        let bytes = feed.push(Bytes::copy_from_slice(data));
        if bytes < FULL {
            return Ok(());
        }
        let of_all: usize = locked(&self.of).values().map(|feed| feed.bytes()).sum();
        if bytes > TOO_MUCH || of_all > TOO_MUCH_AT_ALL {
            return Err(Flood);
        }
        let pause = if data.len() <= TRICKLE as usize { LONG_PAUSE } else { PAUSE };
        let _ = tokio::time::timeout(pause, feed.room.notified()).await;
        Ok(())
    }

    /// How large windows are made next.
    pub(super) fn window(&self) -> u32 {
        let full = locked(&self.of).values().any(|feed| feed.bytes() >= FULL);
        if full { TRICKLE } else { WINDOW }
    }

    /// The client sends no more on a channel.
    pub(super) fn end(&self, channel: ChannelId) {
        if let Some(feed) = locked(&self.of).get(&channel) {
            feed.end();
        }
    }

    /// The channel is gone: its feed stays until whoever uses it lets go.
    pub(super) fn close(&self, channel: ChannelId) {
        if let Some(feed) = locked(&self.of).get(&channel) {
            feed.close(false);
        }
    }

    /// Nobody uses the feed any more.
    pub(super) fn forget(&self, channel: ChannelId) {
        if let Some(feed) = locked(&self.of).remove(&channel) {
            feed.close(true);
        }
    }

    /// The connection is gone; with `cut` so is what it has sent and nobody has taken.
    pub(super) fn close_all(&self, cut: bool) {
        let feeds = locked(&self.of);
        self.over.store(true, Ordering::SeqCst);
        feeds.values().for_each(|feed| feed.close(cut));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_comes_goes_in_order_and_ends() {
        let feed = Feed::default();
        feed.push(Bytes::from_static(b"a"));
        feed.push(Bytes::from_static(b"b"));
        feed.end();
        feed.push(Bytes::from_static(b"late"));
        assert_eq!(feed.next().await.as_deref(), Some(&b"a"[..]));
        assert_eq!(feed.next().await.as_deref(), Some(&b"b"[..]));
        assert_eq!(feed.next().await, None);
        assert_eq!(feed.bytes(), 0);
    }

    #[tokio::test]
    async fn a_closed_feed_takes_nothing_and_tells() {
        let feed = Arc::new(Feed::default());
        let waiting = tokio::spawn({
            let feed = Arc::clone(&feed);
            async move { feed.closed().await }
        });
        feed.push(Bytes::from_static(b"a"));
        feed.push(Bytes::from_static(b"b"));
        feed.close(false);
        waiting.await.unwrap();
        feed.closed().await;
        assert_eq!(feed.next().await.as_deref(), Some(&b"a"[..]), "what came before is handed on");
        feed.push(Bytes::from_static(b"late"));
        feed.close(true);
        feed.abandoned().await;
        assert_eq!(feed.next().await, None);
        assert_eq!(feed.bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_left_of_a_channel_is_not_left_for_ever() {
        let feed = Feed::default();
        feed.push(Bytes::from_static(b"a"));
        feed.close(false);
        feed.abandoned().await;
        let feeds = Feeds::default();
        feeds.close_all(false);
        let channel = russh::keys::ssh_encoding::Decode::decode(&mut &[0u8, 0, 0, 7][..]).unwrap();
        feeds.of(channel).closed().await;
    }

    #[tokio::test(start_paused = true)]
    async fn full_feeds_make_windows_small_and_floods_are_refused() {
        let feeds = Feeds::default();
        // The only way to a channel's number is by the wire.
        let channel = russh::keys::ssh_encoding::Decode::decode(&mut &[0u8, 0, 0, 7][..]).unwrap();
        let piece = vec![0u8; 32 << 10];
        assert_eq!(feeds.put(channel, &piece).await, Ok(()), "a channel that is not there");
        let feed = feeds.of(channel);
        let mut sent = 0;
        while feeds.window() == WINDOW {
            feeds.put(channel, &piece).await.unwrap();
            sent += piece.len();
        }
        assert_eq!(sent, FULL);
        feed.next().await.unwrap();
        assert_eq!(feeds.window(), WINDOW);
        let mut put = Ok(());
        for _ in 0..TOO_MUCH / piece.len() + 2 {
            put = feeds.put(channel, &piece).await;
        }
        assert_eq!(put, Err(Flood));
        feeds.forget(channel);
        assert_eq!(feeds.count(), 0);
        assert_eq!(feed.next().await, None);
    }
}

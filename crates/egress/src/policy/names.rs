//! Patterns of names, asked about one name: a table of exact names, and a tree of labels from the right
//! for wildcards. A lookup costs a few hashes, however many patterns there are.

use std::cmp::Reverse;
use std::collections::HashMap;

use bivouac_types::policy::HostPattern;

/// A map from patterns to entries.
#[derive(Debug)]
pub(super) struct Names<E> {
    exact: HashMap<Box<str>, Ports<E>>,
    /// Nodes of the tree; the first is the root.
    nodes: Vec<Node>,
    wildcards: Vec<Wildcard<E>>,
}

/// Entries of one pattern by port; the one without a port last.
type Ports<E> = Vec<(Option<u16>, E)>;

#[derive(Debug)]
struct Wildcard<E> {
    /// Greater decides.
    rank: Rank,
    ports: Ports<E>,
}

/// Literal labels, fewer `*`, not beginning with `*`, the lower text.
type Rank = (usize, Reverse<usize>, bool, Reverse<Box<str>>);

#[derive(Debug, Default)]
struct Node {
    labels: HashMap<Box<str>, usize>,
    /// One label, whatever it is.
    one: Option<usize>,
    /// A pattern that ends here: the whole name is read.
    end: Option<usize>,
    /// A pattern that begins with `*` here: one or more labels are left.
    rest: Option<usize>,
}

impl<E> Default for Names<E> {
    fn default() -> Self {
        Self { exact: HashMap::new(), nodes: vec![Node::default()], wildcards: Vec::new() }
    }
}

impl<E> Names<E> {
    /// Adds a pattern. A second entry for the same pattern and port replaces the first.
    pub(super) fn insert(&mut self, pattern: &HostPattern, port: Option<u16>, entry: E) {
        let text = pattern.as_str();
        if !pattern.is_wildcard() {
            return put(self.exact.entry(text.into()).or_default(), port, entry);
        }
        let (inner, deep) = match text.strip_prefix('*') {
            Some(rest) => (rest.strip_prefix('.'), true),
            None => (Some(text), false),
        };
        let mut at = 0;
        for label in inner.into_iter().flat_map(|t| t.rsplit('.')) {
            let new = self.nodes.len();
            let node = &mut self.nodes[at];
            at = match label {
                "*" => *node.one.get_or_insert(new),
                _ => *node.labels.entry(label.into()).or_insert(new),
            };
            if at == new {
                self.nodes.push(Node::default());
            }
        }
        let node = &mut self.nodes[at];
        let slot = if deep { &mut node.rest } else { &mut node.end };
        let index = *slot.get_or_insert_with(|| {
            let stars = text.split('.').filter(|label| *label == "*").count();
            let literals = text.split('.').count() - stars;
            let rank = (literals, Reverse(stars), !deep, Reverse(text.into()));
            self.wildcards.push(Wildcard { rank, ports: Vec::new() });
            self.wildcards.len() - 1
        });
        put(&mut self.wildcards[index].ports, port, entry);
    }

    /// The entry that decides about a name on a port; without a port any entry counts.
    pub(super) fn find(&self, name: &str, port: Option<u16>) -> Option<&E> {
        if let Some(found) = self.exact.get(name).and_then(|ports| pick(ports, port)) {
            return Some(found);
        }
        if self.wildcards.is_empty() {
            return None;
        }
        let mut best = None;
        self.walk(0, Some(name), port, &mut best);
        best.map(|(_, entry)| entry)
    }

    /// Looks at all wildcards that cover the name; `left` is the part that is not read yet. A node is
    /// seen at most once for a name, so a hostile list costs no more than its own length.
    fn walk<'a>(
        &'a self,
        at: usize,
        left: Option<&str>,
        port: Option<u16>,
        best: &mut Option<(&'a Rank, &'a E)>,
    ) {
        let node = &self.nodes[at];
        let index = if left.is_some() { node.rest } else { node.end };
        if let Some(wildcard) = index.map(|i| &self.wildcards[i])
            && best.is_none_or(|(rank, _)| *rank < wildcard.rank)
            && let Some(entry) = pick(&wildcard.ports, port)
        {
            *best = Some((&wildcard.rank, entry));
        }
        let Some(left) = left else { return };
        let (left, label) = match left.rsplit_once('.') {
            Some((left, label)) => (Some(left), label),
            None => (None, left),
        };
        for next in node.labels.get(label).into_iter().chain(&node.one) {
            self.walk(*next, left, port, best);
        }
    }

    /// The entry of `*` that covers a port.
    pub(super) fn any(&self, port: u16) -> Option<&E> {
        let index = self.nodes[0].rest?;
        pick(&self.wildcards[index].ports, Some(port))
    }

    /// All entries.
    pub(super) fn iter(&self) -> impl Iterator<Item = &E> {
        let wildcards = self.wildcards.iter().map(|wildcard| &wildcard.ports);
        self.exact.values().chain(wildcards).flatten().map(|(_, entry)| entry)
    }
}

fn put<E>(ports: &mut Ports<E>, port: Option<u16>, entry: E) {
    match ports.iter_mut().find(|(p, _)| *p == port) {
        Some((_, old)) => *old = entry,
        None => ports.push((port, entry)),
    }
    // Whatever the order of the list was: ports first, in order.
    ports.sort_by_key(|(port, _)| (port.is_none(), *port));
}

fn pick<E>(ports: &Ports<E>, wanted: Option<u16>) -> Option<&E> {
    let fits = |port: &Option<u16>| port.is_none() || wanted.is_none() || *port == wanted;
    ports.iter().find(|(port, _)| fits(port)).map(|(_, entry)| entry)
}

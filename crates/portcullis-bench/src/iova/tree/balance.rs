//! The tree as a tree: walking, linking, unlinking and keeping it balanced. All O(log n), none allocates.

use super::HoleTree;
use super::node::{NIL, Node, Path, Summary};

impl HoleTree {
    /// The node at `index`, which exists.
    #[inline]
    pub(super) fn node(&self, index: u32) -> &Node {
        &self.nodes[index as usize]
    }

    /// The node at `index`, which exists.
    #[inline]
    pub(super) fn node_mut(&mut self, index: u32) -> &mut Node {
        &mut self.nodes[index as usize]
    }

    /// The hole at `index`, which exists, as its start and length.
    pub(super) fn hole(&self, index: u32) -> (u64, u64) {
        let node = self.node(index);
        (node.start, node.pages)
    }

    /// Changes the hole at `index` without changing its place in the order. [`HoleTree::restore`] follows.
    pub(super) fn set(&mut self, index: u32, start: u64, pages: u64) {
        let node = self.node_mut(index);
        node.start = start;
        node.pages = pages;
    }

    /// The summary of the subtree at `index`, which may be [`NIL`].
    #[inline]
    pub(super) fn summary(&self, index: u32) -> &Summary {
        self.nodes.get(index as usize).map_or(&Summary::EMPTY, |node| &node.summary)
    }

    /// The highest hole that begins at `page` or below, with the way to it in `path`.
    pub(super) fn locate(&self, page: u64, path: &mut Path) -> Option<u32> {
        path.truncate(0);
        let mut found = 0;
        let mut index = self.root;
        while let Some(node) = self.nodes.get(index as usize) {
            path.push(index);
            if node.start <= page {
                found = path.len();
                index = node.right;
            } else {
                index = node.left;
            }
        }
        path.truncate(found);
        found.checked_sub(1).map(|depth| path.get(depth))
    }

    /// Appends `index` and what follows from it by `next`, as far as that goes, to `path`.
    pub(super) fn descend(&self, path: &mut Path, index: u32, next: impl Fn(&Node) -> u32) {
        let mut index = index;
        while let Some(node) = self.nodes.get(index as usize) {
            path.push(index);
            index = next(node);
        }
    }

    /// Links the leaf `index` below the end of `path`, which leads to its place.
    pub(super) fn attach(&mut self, path: &mut Path, index: u32) {
        let start = self.node(index).start;
        match path.len().checked_sub(1) {
            None => self.root = index,
            Some(last) => {
                let parent = self.node_mut(path.get(last));
                if start < parent.start {
                    parent.left = index;
                } else {
                    parent.right = index;
                }
            }
        }
        self.restore(path, usize::MAX);
    }

    /// Takes the node at the end of `path` out of the tree.
    pub(super) fn remove(&mut self, path: &mut Path) {
        let at = path.len().saturating_sub(1);
        let index = path.get(at);
        let node = self.node(index);
        if node.left == NIL || node.right == NIL {
            self.unlink(path, usize::MAX);
            return;
        }
        // Its successor has at most one child: that node goes instead and leaves its hole here.
        let right = node.right;
        self.descend(path, right, |node| node.left);
        let (start, pages) = self.hole(path.get(path.len().saturating_sub(1)));
        self.set(index, start, pages);
        self.unlink(path, at);
    }

    /// Takes the node at the end of `path`, which has at most one child, out of the tree. Another hole on
    /// the way, at depth `changed`, may have changed as well.
    pub(super) fn unlink(&mut self, path: &mut Path, changed: usize) {
        let at = path.len().saturating_sub(1);
        let index = path.get(at);
        let node = self.node(index);
        let child = if node.left == NIL { node.right } else { node.left };
        self.relink(path, at, child);
        path.truncate(at);
        let unused = self.unused;
        self.node_mut(index).left = unused;
        self.unused = index;
        self.holes -= 1;
        self.restore(path, changed);
    }

    /// Puts `new` in the place of the node at depth `at`.
    fn relink(&mut self, path: &Path, at: usize, new: u32) {
        let old = path.get(at);
        match at.checked_sub(1) {
            None => self.root = new,
            Some(above) => {
                let parent = self.node_mut(path.get(above));
                if parent.left == old {
                    parent.left = new;
                } else {
                    parent.right = new;
                }
            }
        }
    }

    /// Restores summaries and balance on the way up, after a change below or at the end of `path` and
    /// possibly to the hole at depth `changed`.
    ///
    /// Stops where a subtree's summary, which includes its height, comes out as before: nothing above
    /// depends on anything else. Not below `changed`, though, where the next reason to go on is.
    pub(super) fn restore(&mut self, path: &Path, changed: usize) {
        for depth in (0..path.len()).rev() {
            let index = path.get(depth);
            let old = self.node(index).summary;
            let top = self.rebalance(index);
            if top != index {
                self.relink(path, depth, top);
            }
            if depth <= changed && self.node(top).summary == old {
                break;
            }
        }
    }

    /// Balances the subtree at `index`, whose children are balanced and at most two levels apart, and
    /// recomputes its summary. Returns the subtree's new root.
    fn rebalance(&mut self, index: u32) -> u32 {
        let (left, right) = (self.node(index).left, self.node(index).right);
        let (left_height, right_height) = (self.height_at(left), self.height_at(right));
        if left_height > right_height + 1 {
            let child = self.node(left);
            if self.height_at(child.left) < self.height_at(child.right) {
                let top = self.rotate_left(left);
                self.node_mut(index).left = top;
            }
            self.rotate_right(index)
        } else if right_height > left_height + 1 {
            let child = self.node(right);
            if self.height_at(child.right) < self.height_at(child.left) {
                let top = self.rotate_right(right);
                self.node_mut(index).right = top;
            }
            self.rotate_left(index)
        } else {
            self.summarise(index);
            index
        }
    }

    /// The height of the subtree at `index`, which may be [`NIL`].
    fn height_at(&self, index: u32) -> u32 {
        self.summary(index).height()
    }

    /// Recomputes the summary of the node at `index` from its hole and its children.
    fn summarise(&mut self, index: u32) {
        let node = self.node(index);
        let summary = Summary::of(node.start, node.pages, self.summary(node.left), self.summary(node.right));
        self.node_mut(index).summary = summary;
    }

    /// Makes the left child of `index`, which exists, the root of the subtree and returns it.
    fn rotate_right(&mut self, index: u32) -> u32 {
        let top = self.node(index).left;
        self.node_mut(index).left = self.node(top).right;
        self.node_mut(top).right = index;
        self.summarise(index);
        self.summarise(top);
        top
    }

    /// Makes the right child of `index`, which exists, the root of the subtree and returns it.
    fn rotate_left(&mut self, index: u32) -> u32 {
        let top = self.node(index).right;
        self.node_mut(index).right = self.node(top).left;
        self.node_mut(top).left = index;
        self.summarise(index);
        self.summarise(top);
        top
    }
}

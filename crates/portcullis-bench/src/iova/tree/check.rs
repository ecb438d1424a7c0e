//! The tree's invariants, checked the slow way.

use super::node::{MAX_DEPTH, NIL};
use super::{HoleTree, MAX_ORDER};

/// What a subtree turned out to hold.
struct Subtree {
    height: u32,
    holes: usize,
    pages: u64,
    /// The longest run behind a multiple of `2^k`, for each `k`.
    longest: [u64; MAX_ORDER as usize + 1],
}

impl HoleTree {
    /// The height of the tree. For tests.
    #[doc(hidden)]
    pub fn height(&self) -> u32 {
        self.summary(self.root).height()
    }

    /// Verifies the order of the holes, that none touch, the balance, every summary against a computation
    /// that shares nothing with it, and the accounts. O(n); does not allocate. For tests.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), &'static str> {
        let mut behind = None;
        let all = self.check_subtree(self.root, MAX_DEPTH, &mut behind)?;
        if all.holes != self.holes {
            return Err("the number of holes is wrong");
        }
        if all.pages != self.free_pages {
            return Err("the number of free pages is wrong");
        }
        let mut slots = self.holes;
        let mut index = self.unused;
        while let Some(node) = self.nodes.get(index as usize) {
            slots += 1;
            if slots > self.nodes.len() {
                return Err("the list of unused nodes is circular or holds used ones");
            }
            index = node.left;
        }
        if slots != self.nodes.len() {
            return Err("a node is neither used nor unused");
        }
        if self.live == 0 && self.runs != self.holes {
            return Err("the estimate of runs was not settled");
        }
        Ok(())
    }

    /// Verifies that the nodes are paid for which giving back everything, in any order, may need. Holds as
    /// long as the tree's user gives back exactly what it was given. Constant time. For tests.
    #[doc(hidden)]
    pub fn check_prepaid(&self) -> Result<(), &'static str> {
        let bound = self.live.saturating_add(self.runs);
        if self.holes > bound {
            return Err("there are more holes than there should ever be");
        }
        if bound > self.nodes.capacity() {
            return Err("a node is not paid for");
        }
        Ok(())
    }

    /// Checks the subtree at `index`. `behind` is the end of the hole before it, and becomes that of its
    /// last one. Recursive, at most `depth` levels.
    fn check_subtree(
        &self,
        index: u32,
        depth: usize,
        behind: &mut Option<u64>,
    ) -> Result<Subtree, &'static str> {
        if index == NIL {
            return Ok(Subtree { height: 0, holes: 0, pages: 0, longest: [0; MAX_ORDER as usize + 1] });
        }
        let depth = depth.checked_sub(1).ok_or("the tree is too deep")?;
        let node = self.nodes.get(index as usize).ok_or("a link leads nowhere")?;
        let left = self.check_subtree(node.left, depth, behind)?;
        if node.pages == 0 {
            return Err("a hole is empty");
        }
        if behind.is_some_and(|behind| node.start <= behind) {
            return Err("two holes overlap, touch or are out of order");
        }
        let end = node.start.checked_add(node.pages).ok_or("a hole wraps")?;
        *behind = Some(end);
        let right = self.check_subtree(node.right, depth, behind)?;
        if left.height.abs_diff(right.height) > 1 {
            return Err("the tree is not balanced");
        }
        let height = left.height.max(right.height) + 1;
        if node.summary.height() != height {
            return Err("a height is wrong");
        }
        let mut longest = [0; MAX_ORDER as usize + 1];
        for (order, longest) in (0..).zip(longest.iter_mut()) {
            let first = node.start.checked_next_multiple_of(1 << order);
            let own = first.map_or(0, |first| end.saturating_sub(first));
            *longest = own.max(left.longest[order as usize]).max(right.longest[order as usize]);
            if node.summary.longest(order) != *longest {
                return Err("a summary is wrong");
            }
        }
        let holes = left.holes + right.holes + 1;
        let pages = left.pages + right.pages + node.pages;
        Ok(Subtree { height, holes, pages, longest })
    }
}

use super::*;
use loom::sync::Arc;
use loom::thread;

/// Two CPUs send to a third, which takes what has come meanwhile and again at the end: every range
/// arrives once, with its order.
#[test]
fn what_is_sent_arrives_once() {
    loom::model(|| {
        let meta = Arc::new(RangeMeta::new(4));
        (0..4).for_each(|page| meta.make(page, 0, Link::END.bits()).unwrap());
        let remote_queues: Arc<[CachePadded<RemoteQueue>; 1]> = Arc::new([CachePadded(RemoteQueue::new())]);
        let send = |pages: [u64; 2]| {
            let (meta, remote_queues) = (Arc::clone(&meta), Arc::clone(&remote_queues));
            move || {
                let remote_batch = RemoteBatch::default();
                for page in pages {
                    let word = meta.word(page, 0).unwrap();
                    remote_batch.add(
                        &meta,
                        &remote_queues[..],
                        0,
                        Returned { word, page, order: 0, zone: 0 },
                        512,
                    );
                }
                remote_batch.send(&meta, &remote_queues[..]);
            }
        };
        let other = thread::spawn(send([0, 1]));
        send([2, 3])();
        let mut seen = [0; 4];
        let mut walk = |mut link| {
            while let Some((page, order, next)) = meta.follow(link) {
                assert_eq!(order, 0);
                seen[page as usize] += 1;
                link = next;
            }
        };
        walk(remote_queues[0].take());
        other.join().unwrap();
        walk(remote_queues[0].take());
        assert_eq!(seen, [1; 4]);
    });
}

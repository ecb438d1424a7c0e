use super::*;
use alloc::vec::Vec;

#[test]
fn each_cpu_has_a_value_and_those_without_share_one() {
    for cpus in [0, 1, 3] {
        let mut next = 0..;
        let values = PerCpu::new(cpus, || next.next().unwrap()).unwrap();
        assert_eq!(values.iter().copied().collect::<Vec<_>>(), (0..=cpus).collect::<Vec<_>>());
        for index in 0..cpus {
            assert_eq!(values.get(Some(index)), (&index, true));
        }
        // Any other number is that of no CPU.
        for none in [None, Some(cpus), Some(usize::MAX)] {
            assert_eq!(values.get(none), (&cpus, false));
        }
    }
}

#[test]
fn neighbours_share_no_two_lines() {
    let values = PerCpu::new(2, || 0_u8).unwrap();
    let places: Vec<_> = values.iter().map(|value| core::ptr::from_ref(value).addr()).collect();
    assert!(places.iter().all(|place| place % 128 == 0));
    assert!(places.windows(2).all(|pair| pair[1] - pair[0] >= 128));
}

#[test]
fn what_all_add_is_summed_and_told_apart() {
    let counts = PerCpu::new(2, Counter::default).unwrap();
    let add = |cpu, n| {
        let (count, alone) = counts.get(cpu);
        count.add(alone, n);
    };
    let adds = [(Some(0), 5), (Some(1), 70), (None, 900), (Some(0), 1), (None, 3)];
    adds.iter().for_each(|(cpu, n)| add(*cpu, *n));
    // Fewer, on another CPU than counted them.
    add(Some(1), 76_u64.wrapping_neg());
    let each: Vec<_> = counts.iter().map(Counter::get).collect();
    assert_eq!(each, [6, 6_u64.wrapping_neg(), 903]);
}

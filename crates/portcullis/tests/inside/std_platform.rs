use std::{format, vec};

use super::*;

/// Returns whether the owner of `cpu` needs no fence of its own.
fn is_light(cpu: &LocalCpu<'_>) -> bool {
    format!("{cpu:?}").contains("light_fence: true")
}

#[test]
#[cfg(all(target_os = "linux", not(miri)))]
fn owners_without_a_fence_have_others_who_make_all_cpus_pass_one() {
    let platform = StdPlatform::new();
    // `include/uapi/linux/membarrier.h`: register, then the barrier itself.
    let (register, all) = (1 << 4, 1 << 3);
    assert_eq!(barrier::COMMANDS.take(), [register]);
    let light = platform.with_cpu(|cpu| is_light(cpu.unwrap()));
    assert_eq!(light, platform.inner.light_fence);
    platform.fence_all();
    assert_eq!(barrier::COMMANDS.take(), vec![all; usize::from(light)]);
    assert_eq!(platform.with_cpu_fast(is_light), light.then_some(true));
}

#[test]
#[cfg(all(target_os = "linux", not(miri)))]
fn the_barrier_is_used_where_the_system_has_it() {
    // SAFETY: the query, command 0, takes numbers and touches no memory.
    let commands = unsafe { libc::syscall(libc::SYS_membarrier, 0, 0, 0) };
    let (register, all) = (1 << 4, 1 << 3);
    let has = commands >= 0 && commands & register != 0 && commands & all != 0;
    assert_eq!(StdPlatform::new().inner.light_fence, has);
}

#[test]
fn a_system_without_a_thread_is_an_error_that_says_what_to_do() {
    timer::tests::NO_THREADS.set(true);
    let made = StdPlatform::try_new();
    timer::tests::NO_THREADS.set(false);
    let error = format!("{}", made.unwrap_err());
    assert!(
        error.starts_with("the system has no thread to give for the timers (") && error.contains("): end"),
        "{error}"
    );
    assert!(
        error.ends_with("allow more of them (ulimit -u; TasksMax of a service; pids.max of a cgroup)"),
        "{error}"
    );
    StdPlatform::try_new().unwrap();
}

#[test]
fn owners_pass_a_fence_themselves_where_the_system_has_none_for_all() {
    let platform = StdPlatform::with_fence(DEFAULT_CPUS, false).unwrap();
    assert!(!platform.with_cpu(|cpu| is_light(cpu.unwrap())));
    assert_eq!(platform.with_cpu_fast(is_light), None);
    platform.fence_all();
    assert!(barrier::COMMANDS.take().is_empty(), "the process is not registered");
}

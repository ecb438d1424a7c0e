//! Verdicts on made-up figures.

use portcullis_trace::replay::Work;

use super::*;
use crate::replay::short_run;

/// Runs in which each policy has this cost and this spread, and leaves so much open. As results of earlier versions they have no counts, so
/// that the choice rests on the run with the least cost.
fn runs(costs: &[(Mode, f64, f64, f64)]) -> Runs {
    let (mut runs, _) = short_run();
    (runs.report.work_ns, runs.report.work) = (1_000.0, Work::Asked);
    let known = |mode: Mode| costs.iter().find(|(known, ..)| *known == mode);
    runs.report.policies.retain(|policy| known(policy.mode).is_some());
    runs.costs.retain(|cost| costs.iter().any(|(mode, ..)| mode.name() == cost.policy));
    for (policy, cost) in runs.report.policies.iter_mut().zip(&mut runs.costs) {
        let (_, ns, spread, open) = *known(policy.mode).unwrap();
        (cost.median_ns, cost.least_ns, cost.most_ns) = (ns, ns - spread, ns + spread);
        policy.copied_bytes = None;
        policy.relative_to_passthrough = Some(1000.0 / (1000.0 + ns));
        (policy.exposure.stale_byte_s, policy.exposure.neighbour_byte_s) = (0.0, open);
    }
    runs
}

#[test]
fn a_policy_that_costs_less_and_is_not_chosen_is_named() {
    let strict = Mode::Each(Policy::Strict);
    // A percent of the CPU's time is not worth it, where less is left open.
    let costs = [(strict, 700.0, 1.0, 9e3), (Mode::StrictRing, 3.0, 1.0, 9e3), (Mode::Bounce, 9.0, 1.0, 0.0)];
    let verdict = Verdict::of(&runs(&costs), Offer::Library).sentences.join(" ");
    assert!(verdict.contains("Choose bounce (0.9 %)"), "{verdict}");
    assert!(verdict.contains(" Strict-ring (0.3 %) costs less and leaves more open."), "{verdict}");
    assert!(
        verdict.contains(
            "protection from devices takes 0.3 % (strict-ring) to 41.2 % (strict) of the CPU time."
        ),
        "{verdict}"
    );
    let costs = [(strict, 90.0, 50.0, 0.0), (Mode::StrictRing, 40.0, 0.0, 0.0)];
    let verdict = Verdict::of(&runs(&costs), Offer::Library).sentences.join(" ");
    assert!(verdict.contains("Choose strict (8.3 %)"), "{verdict}");
    assert!(verdict.contains(" Strict-ring (3.8 %) may cost less."), "{verdict}");
    // What is less by no tenth of a percent is not worth a word, and at most that is what there is to say.
    let costs = [(strict, 0.4, 0.1, 9e3), (Mode::Adaptive, 1.2, 0.1, 0.0)];
    let verdict = Verdict::of(&runs(&costs), Offer::Library).sentences.join(" ");
    assert!(verdict.contains("takes at most 0.1 % of the CPU time."), "{verdict}");
    assert!(!verdict.contains(" %) costs less"), "{verdict}");
    assert!(
        verdict.contains("Strict (less than 0.1 %) gives each buffer back at once and leaves"),
        "{verdict}"
    );
    // Whatever it does better, that it leaves more open is said once.
    let costs = [(strict, 3.0, 0.1, 9e3), (Mode::Adaptive, 9.0, 0.1, 0.0)];
    let verdict = Verdict::of(&runs(&costs), Offer::Library).sentences.join(" ");
    assert!(
        verdict
            .contains(" Strict (0.3 %) costs less and gives each buffer back at once and leaves more open."),
        "{verdict}"
    );
    // One bad run of the dearer policy does not make it the equal of the cheaper one.
    let costs = [(strict, 700.0, 9.0, 0.0), (Mode::StrictRing, 40.0, 1.0, 9e3)];
    let mut runs = runs(&costs);
    runs.costs.iter_mut().for_each(|cost| cost.most_ns *= 20.0);
    let verdict = Verdict::of(&runs, Offer::Library).sentences.join(" ");
    assert!(verdict.contains("Choose strict-ring (3.8 %)"), "{verdict}");
    assert!(
        verdict.contains(" Strict (41.2 %) leaves nothing open and gives each buffer back at once."),
        "{verdict}"
    );
}

#[test]
fn the_recording_s_own_rate_is_among_those_that_are_said() {
    // Just beyond the border, and beyond all steps.
    for (work_ns, from) in [(1.93e6, "1.9ms"), (50e6, "1.9ms")] {
        let costs = [(Mode::Each(Policy::Strict), 1e3, 1.0, 9e3), (Mode::Bounce, 20e3, 1.0, 0.0)];
        let mut runs = runs(&costs);
        runs.report.work_ns = work_ns;
        let verdict = Verdict::of(&runs, Offer::Module);
        let rates = verdict.sentences.iter().find(|said| said.starts_with("Of the strict")).unwrap();
        assert_eq!(verdict.choice, Some("bounce"), "{rates}");
        assert!(rates.contains(&format!("bounce from {from} on")), "{rates}");
        assert!(rates.contains(&format!("below {from} strict")), "{rates}");
    }
}

#[test]
fn other_waits_may_change_the_choice() {
    let strict = Mode::Each(Policy::Strict);
    let said = |costs: &[(Mode, f64, f64, f64)], waits: &[f64]| {
        let mut runs = runs(costs);
        for (policy, wait) in runs.report.policies.iter_mut().zip(waits) {
            policy.wait_ns_per_op = *wait;
        }
        let said = Verdict::of(&runs, Offer::Library).sentences;
        said.into_iter().find(|text| text.contains("IOMMU's waits"))
    };
    // At 1 us of other work: (900 - 750 of waits) / 1150, and (900 + 3000) / 4900.
    let costs = [(strict, 900.0, 1.0, 0.0), (Mode::Bounce, 500.0, 1.0, 0.0)];
    assert_eq!(
        said(&costs, &[1000.0, 0.0]).as_deref(),
        Some(
            "If the IOMMU's waits are a quarter as long as assumed, choose strict (13.0 %); if four times as long, bounce (33.3 %)."
        )
    );
    assert_eq!(
        said(&costs, &[40.0, 0.0]).as_deref(),
        Some(
            "The choice is the same if the IOMMU's waits are a quarter as long (33.3 %) or four times as long (33.3 %) as assumed."
        )
    );
    // Without waits, and with one policy alone, there is nothing to say.
    assert_eq!(said(&costs, &[0.0, 0.0]), None);
    assert_eq!(said(&costs[..1], &[700.0]), None);
    // Runs that differ by less than their spread do so wherever the waits put them.
    let costs = [(strict, 700.0, 90.0, 0.0), (Mode::Bounce, 660.0, 90.0, 0.0)];
    assert!(said(&costs, &[30.0, 30.0]).unwrap().starts_with("The choice is the same"));
}

#[test]
fn what_a_recording_of_the_iommu_alone_would_copy_is_not_guessed() {
    let strict = Mode::Each(Policy::Strict);
    let costs = [(strict, 700.0, 1.0, 9e3), (Mode::Bounce, 9.0, 1.0, 0.0), (Mode::Adaptive, 5.0, 1.0, 0.0)];
    let mut runs = runs(&costs);
    assert_eq!(Verdict::of(&runs, Offer::Library).choice, Some("adaptive"));
    runs.report.trace.iommu_only = true;
    runs.costs.iter_mut().for_each(|cost| cost.known = cost.policy == "strict");
    let verdict = Verdict::of(&runs, Offer::Library);
    let said = verdict.sentences.join(" ");
    assert_eq!(verdict.choice, Some("strict"));
    assert!(!said.contains("ounce") && !said.contains("daptive"), "{said}");
    runs.report.policies.iter_mut().for_each(|policy| policy.exposure.neighbour_byte_s = 0.0);
    let said = Verdict::of(&runs, Offer::Library).sentences.join(" ");
    assert!(said.contains("; what else lies in a buffer's pages is not known."), "{said}");
}

#[test]
fn the_first_sentence_says_which_work_the_figures_are_of() {
    let mut runs = runs(&[(Mode::Each(Policy::Strict), 1_000.0, 1.0, 9e3)]);
    let mut first = |ns, work, cpus| {
        (runs.report.work_ns, runs.report.work, runs.report.trace.cpus) = (ns, work, cpus);
        runs.report.policies[0].relative_to_passthrough = Some(ns / (ns + 1_000.0));
        Verdict::of(&runs, Offer::Library).sentences.remove(0)
    };
    assert_eq!(
        first(99_000.0, Work::Most, 2),
        "At most 99us of other CPU work came with each mapping, if the recording's 2 CPUs never idled: then protection from \
         devices takes at least 1.0 % of the CPU time."
    );
    assert_eq!(
        first(1e9, Work::Most, 1),
        "At most 1000ms of other CPU work came with each mapping, if the recording's CPU never idled: then protection from \
         devices takes less than 0.1 % of the CPU time."
    );
    assert_eq!(
        first(9_000.0, Work::Measured, 2),
        "The recorded machine took 9us of CPU time for each mapping, its protection included: where that comes with each, \
         protection from devices takes 10.0 % of the CPU time."
    );
    assert_eq!(
        first(1e4, Work::Asked, 1),
        "If 10us of other CPU work comes with each mapping (--work), protection from devices takes 9.1 % of the CPU time."
    );
    assert_eq!(
        first(1e3, Work::Assumed, 1),
        "The recording does not tell how much other CPU work comes with each mapping. If it is 1us (--work), protection from \
         devices takes 50.0 % of the CPU time."
    );
}

#[test]
fn it_is_said_at_which_rate_another_policy_is_to_be_chosen() {
    let strict = Mode::Each(Policy::Strict);
    let said = |costs: &[(Mode, f64, f64, f64)], offer| {
        let runs = runs(costs);
        let all = Verdict::of(&runs, offer).sentences;
        all.into_iter().find(|text| text.starts_with("Of the strict")).unwrap()
    };
    let all =
        [(strict, 780.0, 9.0, 9e3), (Mode::StrictRing, 60.0, 3.0, 9e3), (Mode::Bounce, 430.0, 9.0, 0.0)];
    assert_eq!(
        said(&all, Offer::Library),
        "Of the strict policies, by the other CPU work for each mapping: bounce from 36us on (1.2 % at 36us, up to 27,000 mappings/s on a CPU); \
         below 36us strict-ring (5.7 % at 1us). Strict costs less than 1 % from 77us on (up to 13,000 mappings/s on a CPU)."
    );
    assert_eq!(
        said(&[all[0], all[2]], Offer::Library),
        "Of the strict policies, by the other CPU work for each mapping: bounce at any rate (30.1 % at 1us). Strict costs less than 1 % from 77us on \
         (up to 13,000 mappings/s on a CPU)."
    );
    let three = [
        (Mode::StrictRing, 10.0, 1.0, 9e3),
        (Mode::StrictBatch, 300.0, 1.0, 8e3),
        (Mode::Bounce, 3e3, 9.0, 0.0),
    ];
    assert_eq!(
        said(&three, Offer::Library),
        "Of the strict policies, by the other CPU work for each mapping: bounce from 300us on (1.0 % at 300us, up to 3,300 mappings/s on a CPU); \
         strict-batch down to 29us (1.0 % at 29us, up to 34,000 mappings/s on a CPU); below 29us strict-ring (1.0 % at 1us)."
    );
}

#[test]
fn policies_that_cost_the_same_are_named_together() {
    let strict = Mode::Each(Policy::Strict);
    let said = |costs: &[(Mode, f64, f64, f64)]| {
        let runs = runs(costs);
        Verdict::of(&runs, Offer::Library)
            .sentences
            .into_iter()
            .find(|text| text.starts_with("By counts it costs"))
    };
    let ring = (Mode::StrictRing, 40.0, 1.0, 9e3);
    let tied = |names: &str| {
        Some(format!("By counts it costs the same as {names}, within one percentage point of the CPU time."))
    };
    assert_eq!(said(&[ring, (strict, 700.0, 1.0, 9e3)]), None);
    assert_eq!(said(&[ring, (strict, 50.0, 1.0, 9e3)]), tied("strict-ring"));
    let all =
        [(strict, 49.0, 1.0, 9e3), ring, (Mode::Bounce, 40.0, 1.0, 0.0), (Mode::Adaptive, 45.0, 1.0, 0.0)];
    assert_eq!(said(&all), tied("strict, strict-ring and bounce"));
    // One point more.
    assert_eq!(said(&[ring, (strict, 51.0, 0.5, 9e3)]), None);
}

/// Equal recordings give equal verdicts, however busy the machine: counts stay, and whatever is measured varies, here by half.
#[test]
fn a_loaded_machine_does_not_change_the_choice() {
    let strict = Mode::Each(Policy::Strict);
    let mut random = fastrand::Rng::with_seed(7);
    let counted = [
        (strict, 784.0, 80e3),
        (Mode::StrictBatch, 126.0, 83e3),
        (Mode::StrictRing, 60.0, 88e3),
        (Mode::Bounce, 390.0, 0.0),
        (Mode::Adaptive, 326.0, 0.0),
    ];
    for (work, library) in [(Work::Most, "strict-batch"), (Work::Measured, "adaptive")] {
        for _ in 0..20 {
            let costs = counted.map(|(mode, ns, open)| (mode, ns * (1.0 + random.f64()), 0.0, open));
            let mut runs = runs(&costs);
            (runs.report.work_ns, runs.report.work) = (94_000.0, work);
            for cost in &mut runs.costs {
                cost.least_ns = counted.iter().find(|(mode, ..)| mode.name() == cost.policy).unwrap().1;
            }
            let said = [Offer::Module, Offer::Library].map(|offer| Verdict::of(&runs, offer).choice);
            assert_eq!(said, [Some("bounce"), Some(library)], "{work:?}");
        }
    }
}

/// Of the most work alone, a choice has to be right for a tenth of it, too.
#[test]
fn a_choice_that_holds_at_the_end_of_a_range_alone_is_none() {
    let strict = Mode::Each(Policy::Strict);
    let said = |bounce, work| {
        let mut runs = runs(&[(strict, 847.0, 0.0, 11.0), (Mode::Bounce, bounce, 0.0, 0.0)]);
        (runs.report.work_ns, runs.report.work) = (950_000.0, work);
        let Verdict { sentences, choice } = Verdict::of(&runs, Offer::Library);
        let find = |text: &str| sentences.iter().find(|said| said.contains(text)).cloned();
        (choice.map(str::to_owned), find("how long those CPUs idled"), find("By counts it costs"))
    };
    // 0.92 of a point at the most work, and 8.3 at a tenth of it.
    let (choice, border, tied) = said(9_637.0, Work::Most);
    assert_eq!((choice.as_deref(), tied), (Some("strict"), None));
    assert_eq!(
        border.as_deref(),
        Some(
            "The recording does not tell how long those CPUs idled: strict is right even if they were busy for only a tenth of the time. \
             Where at least 870us of other work comes with each mapping, choose bounce (1.1 %): by counts it is then within one percentage point of the cheapest, and \
             leaves the least open. `portcullis record` measures that work, and --work names it."
        )
    );
    let (choice, border, tied) = said(9_637.0, Work::Measured);
    assert_eq!((choice.as_deref(), border), (Some("bounce"), None));
    assert!(tied.unwrap().contains("the same as strict,"));
    // 0.99 of a point at a tenth, and 1.01.
    for (bounce, expected) in [(1_797.0, "bounce"), (1_830.0, "strict")] {
        let (choice, border, _) = said(bounce, Work::Most);
        assert_eq!((choice.as_deref(), border.is_some()), (Some(expected), expected == "strict"), "{bounce}");
    }
}

#[test]
fn what_lazy_saves_and_leaves_open_is_said() {
    let lazy = Mode::from(Policy::LAZY);
    let said_on = |offer, cost: f64, stale: f64, duration_ns| {
        let mut runs = runs(&[(Mode::Each(Policy::Strict), 1_000.0, 0.0, 9e3), (lazy, cost, 0.0, 9e3)]);
        runs.report.policies.iter_mut().find(|policy| policy.mode == lazy).unwrap().exposure.stale_byte_s =
            stale;
        (runs.report.work_ns, runs.report.trace.duration_ns) = (9_000.0, duration_ns);
        for policy in &mut runs.report.policies {
            let ns = if policy.mode == lazy { cost } else { 1_000.0 };
            policy.relative_to_passthrough = Some(9_000.0 / (9_000.0 + ns));
        }
        let all = Verdict::of(&runs, offer).sentences;
        all.into_iter().find(|said| said.contains("azy would save")).unwrap()
    };
    let said = |cost, stale, duration_ns| said_on(Offer::Library, cost, stale, duration_ns);
    assert_eq!(
        said(250.0, 500.0, 2_000_000_000),
        "Lazy would save 7.3 points of the CPU time (2.7 % instead of strict's 10.0 %); where 1us of other work comes with each mapping, 30.0 points of the \
         CPU time (20.0 % instead of strict's 50.0 %). What was unmapped then stays open to its device for up to 10 ms, to read and to write: here 250 bytes at any \
         time, on average. Take it if you need that time and trust these devices, their makers and their firmware; never for what can be plugged in."
    );
    assert!(
        said(999.0, 500.0, 0)
            .starts_with("Lazy would save nothing to speak of (10.0 %, as strict); where 1us")
    );
    assert!(said(999.0, 500.0, 0).contains("to write: here, in sum, 500 bytes for one second. "));
    assert!(said(999.0, 0.0, 5).contains("to write: here nothing was. "));
    // Under Linux it is its own code of both that counts.
    let linux = said_on(Offer::Module, 250.0, 500.0, 0);
    assert!(
        linux.starts_with("Linux's lazy would save ") && linux.contains(" instead of strict's "),
        "{linux}"
    );
    assert!(!linux.contains("2.7 %"), "{linux}");
}

#[test]
fn it_is_said_where_what_was_measured_would_choose_another_policy() {
    let strict = Mode::Each(Policy::Strict);
    let said = |bounce: f64| {
        let runs = runs(&[(strict, 780.0, 5.0, 9e3), (Mode::Bounce, 590.0 + bounce, bounce, 0.0)]);
        let Verdict { sentences, choice } = Verdict::of(&runs, Offer::Library);
        assert_eq!(choice, Some("bounce"));
        sentences.into_iter().find(|said| said.contains("measured here it"))
    };
    assert_eq!(said(100.0), None);
    assert_eq!(
        said(300.0).as_deref(),
        Some(
            "By the times that were measured here it would be strict (780 ns, where bounce took 890). The choice rests on counts instead \
             (775 and 590 ns), which no other load changes."
        )
    );
}

#[test]
fn what_hardly_differs_is_told_the_same_way_each_time() {
    let strict = Mode::Each(Policy::Strict);
    // The one that is to be chosen and the one that leaves nothing open, whichever of two is cheaper by a little.
    for little in [-5.0, 0.0, 5.0] {
        let dear = [
            (strict, 700.0, 5.0, 9e3),
            (Mode::StrictRing, 40.0, 5.0, 9e3),
            (Mode::Bounce, 190.0, 8.0, 0.0),
            (Mode::Adaptive, 190.0 + little, 8.0, 0.0),
        ];
        let runs = runs(&dear);
        let said = Verdict::of(&runs, Offer::Library).sentences.join(" ");
        assert!(said.contains("Choose strict-ring (3.8 %)"), "{said}");
        assert!(said.contains(". Adaptive ("), "{said}");
    }
    for little in [-5.0, 0.0, 5.0] {
        let alike = [(Mode::Bounce, 40.0, 1.0, 0.0), (Mode::Adaptive, 40.0 + little, 1.0, 0.0)];
        assert_eq!(Verdict::of(&runs(&alike), Offer::Library).choice, Some("adaptive"));
        // Where nothing shares a page, and waits cost nothing, there is no need to keep buffers back.
        let alike = [(strict, 40.0 + little, 1.0, 0.0), (Mode::StrictRing, 40.0, 1.0, 0.0)];
        assert_eq!(Verdict::of(&runs(&alike), Offer::Library).choice, Some("strict"));
    }
    let apart = [(Mode::Bounce, 40.0, 1.0, 0.0), (Mode::Adaptive, 90.0, 1.0, 0.0)];
    assert_eq!(
        Verdict::of(&runs(&apart), Offer::Library).choice,
        Some("bounce"),
        "it is cheaper, beyond doubt"
    );
}

/// Runs of mappings of a page, of which strict takes 49 ns for 490 instructions, and its wait; bounce 300 ns with its copies.
fn of_pages() -> Runs {
    let strict = Mode::Each(Policy::Strict);
    let lazy = Mode::from(Policy::LAZY);
    let mut runs = runs(&[
        (strict, 749.0, 1.0, 9e3),
        (Mode::StrictRing, 60.0, 1.0, 9e3),
        (Mode::Bounce, 300.0, 1.0, 0.0),
        (lazy, 60.0, 1.0, 9e3),
    ]);
    let trace = &mut runs.report.trace;
    (trace.maps, trace.bytes_mapped, trace.pieces_mapped) = (5_000, 5_000 * 4096, 5_000);
    for policy in &mut runs.report.policies {
        policy.operations = 5_000;
        policy.wait_ns_per_op = if policy.mode == strict { 700.0 } else { 0.0 };
        policy.invalidations = if policy.mode == strict { 5_000 } else { 0 };
        policy.copied_bytes = Some(if policy.mode == Mode::Bounce { 5_000 * 4096 } else { 0 });
    }
    runs
}

/// Under Linux all of it is of the kernel's code: the headline, the choice, the borders, and the lines at other rates.
#[test]
fn under_linux_every_figure_has_the_price_of_its_code() {
    let runs = of_pages();
    let verdict = Verdict::of(&runs, Offer::Module);
    let said = verdict.sentences.join(" ");
    // 416.64 and 700 ns; 192.96 ns and four KiB at 74.85 ns each; 336.8 ns.
    for part in [
        "protection from devices takes 33.0 % (linux-bounce) to 52.8 % (linux-strict) of the CPU time.",
        "one CPU in the code of Linux and of our module",
        "Choose bounce (33.0 %)",
        "Under Linux a mapping takes about: strict 52.8 % (908 to 1,533 ns), the module's bounce 33.0 % (396 to 685 ns), lazy 25.2 % (168 to 674 ns)",
        "Linux's lazy would save 27.6 points of the CPU time (25.2 % instead of strict's 52.8 %)",
        "bounce at any rate (33.0 % at 1us). Strict costs less than 1 % from 111us on",
        "The choice is the same if instructions of the kernel take half as long (28.4 %) or twice as long (40.7 %) as assumed.",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let sweep = crate::sweep::render(&runs, Offer::Module, false);
    let plain = anstream::adapter::strip_str(&sweep).to_string();
    let words = |start: &str| -> Vec<&str> {
        plain.lines().find(|line| line.starts_with(start)).unwrap().split_whitespace().collect()
    };
    assert_eq!(words("work "), ["work", "linux-strict", "strict-ring", "linux-bounce", "linux-lazy"]);
    assert_eq!(words("1us "), ["1us", "52.8", "%", "5.7", "%", "*33.0", "%", "25.2", "%"]);
    assert_eq!(
        verdict.sentences[0],
        "Under Linux, no policy that protects leaves 75 % of the CPU time: the best, linux-bounce, leaves 67.0 %."
    );
    // The library's drivers run the library's code.
    let said = Verdict::of(&runs, Offer::Library).sentences.join(" ");
    assert!(said.contains("takes 5.7 % (strict-ring) to 42.8 % (strict)"), "{said}");
    assert!(!said.contains("nstructions of the kernel") && !said.contains("Under Linux"), "{said}");
}

/// What protection leaves is said first where it is too little, and known.
#[test]
fn what_leaves_too_little_is_said_first() {
    let first = |work, ns| {
        let mut runs = of_pages();
        (runs.report.work, runs.report.work_ns) = (work, ns);
        for (policy, cost) in runs.report.policies.iter_mut().zip(&runs.costs) {
            policy.relative_to_passthrough = Some(ns / (ns + cost.median_ns));
        }
        Verdict::of(&runs, Offer::Module).sentences.swap_remove(0)
    };
    let too_little =
        "Under Linux, no policy that protects leaves 75 % of the CPU time: the best, linux-bounce, leaves ";
    assert_eq!(first(Work::Most, 1_000.0), format!("{too_little}at most 67.0 %."));
    assert_eq!(first(Work::Measured, 1_470.0), format!("{too_little}74.9 %."));
    assert!(first(Work::Measured, 1_480.0).starts_with("The recorded machine took 1.5us"));
    assert!(first(Work::Assumed, 1_000.0).starts_with("The recording does not tell how much"));
}

/// On either side of the price that is said the choice is the other one.
#[test]
fn the_price_of_a_copy_at_which_the_choice_changes_is_said() {
    let at = |kib_ns: f64, offer| {
        let mut runs = of_pages();
        let calibration = &mut runs.calibration;
        (calibration.copy_hot_ns.value, calibration.copy_cold_ns.value) = (kib_ns - 1.0, kib_ns + 1.0);
        let Verdict { sentences, choice } = Verdict::of(&runs, offer);
        let said = sentences.into_iter().find(|said| said.starts_with("A copied KiB"));
        (choice.map(str::to_owned), said)
    };
    let said = |text: &str| Some(format!("A copied KiB is assumed to take {text}."));
    // Of 193 ns and four KiB, and of 1,117 ns.
    assert_eq!(
        at(75.0, Offer::Module),
        (Some("bounce".into()), said("75 ns (--calibration): from 250 ns on, choose strict (52.8 %)"))
    );
    assert_eq!(at(240.0, Offer::Module).0.as_deref(), Some("bounce"));
    assert_eq!(
        at(250.0, Offer::Module),
        (Some("strict".into()), said("250 ns (--calibration): up to 240 ns, choose bounce (53.6 %)"))
    );
    // Strict-ring takes 60 ns.
    assert_eq!(at(75.0, Offer::Library).0.as_deref(), Some("strict-ring"));
    // Nothing is copied where Linux has its own modes alone.
    assert_eq!(at(75.0, Offer::Linux).1, None);
}

/// Linux's own modes need none.
#[test]
fn a_choice_that_needs_the_module_says_so_and_names_what_linux_has_without_it() {
    let strict = Mode::Each(Policy::Strict);
    let said = |offer| {
        let runs = runs(&[(strict, 20_000.0, 1.0, 9e3), (Mode::Bounce, 430.0, 0.0, 0.0)]);
        Verdict::of(&runs, offer).sentences.join(" ")
    };
    let text = said(Offer::Module);
    assert!(
        text.contains(", by our module, which has run in QEMU alone so far (docs/linux.md): no device"),
        "{text}"
    );
    assert!(
        text.contains(" Without the module, the next best is Linux's strict (")
            && text.contains(
                " %): no device reaches a buffer after it is given back; it leaves open other data"
            ),
        "{text}"
    );
    let text = said(Offer::Library);
    assert!(text.contains("Choose bounce (") && !text.contains("module"), "{text}");
}

#[test]
fn without_other_work_borders_are_said_as_well() {
    let mut runs = runs(&[(Mode::StrictRing, 40.0, 1.0, 9e3), (Mode::Bounce, 430.0, 9.0, 0.0)]);
    (runs.report.work_ns, runs.report.work) = (0.0, Work::Asked);
    let text = Verdict::of(&runs, Offer::Library).sentences.join(" ");
    assert!(text.contains(": bounce from 38us on ("), "{text}");
}

"""Statistics of a study: intervals over seeds, paired tests, effect sizes, ranks and power.

Pure functions on arrays. They know no run folders, no torch and no Lightning.
"""

from pl_fed.statistics.clusters import ClusterEffect as ClusterEffect
from pl_fed.statistics.clusters import measure_cluster_effect as measure_cluster_effect
from pl_fed.statistics.effects import cliffs_delta as cliffs_delta
from pl_fed.statistics.effects import cohens_d as cohens_d
from pl_fed.statistics.effects import probability_of_superiority as probability_of_superiority
from pl_fed.statistics.effects import rank_biserial as rank_biserial
from pl_fed.statistics.families import correct_by_holm as correct_by_holm
from pl_fed.statistics.families import format_p_value as format_p_value
from pl_fed.statistics.intervals import Interval as Interval
from pl_fed.statistics.intervals import bootstrap_interval as bootstrap_interval
from pl_fed.statistics.intervals import t_interval as t_interval
from pl_fed.statistics.many_tasks import PerformanceProfile as PerformanceProfile
from pl_fed.statistics.many_tasks import aggregate_interval as aggregate_interval
from pl_fed.statistics.many_tasks import interquartile_mean as interquartile_mean
from pl_fed.statistics.many_tasks import performance_profile as performance_profile
from pl_fed.statistics.paired_tests import PairedTest as PairedTest
from pl_fed.statistics.paired_tests import paired_differences as paired_differences
from pl_fed.statistics.paired_tests import paired_t_test as paired_t_test
from pl_fed.statistics.paired_tests import sign_flip_test as sign_flip_test
from pl_fed.statistics.paired_tests import swap_test as swap_test
from pl_fed.statistics.paired_tests import wilcoxon_test as wilcoxon_test
from pl_fed.statistics.power import count_seeds as count_seeds
from pl_fed.statistics.power import paired_t_power as paired_t_power
from pl_fed.statistics.power import smallest_difference as smallest_difference
from pl_fed.statistics.ranks import FriedmanTest as FriedmanTest
from pl_fed.statistics.ranks import RankComparison as RankComparison
from pl_fed.statistics.ranks import compare_ranks as compare_ranks
from pl_fed.statistics.ranks import critical_difference as critical_difference
from pl_fed.statistics.ranks import friedman_test as friedman_test
from pl_fed.statistics.runs import Pairs as Pairs
from pl_fed.statistics.runs import Runs as Runs
from pl_fed.statistics.runs import Scores as Scores
from pl_fed.statistics.runs import arrange_scores as arrange_scores
from pl_fed.statistics.runs import pair_runs as pair_runs
from pl_fed.statistics.runs import resolve_repeated_seeds as resolve_repeated_seeds

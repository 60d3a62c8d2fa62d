import pytest

from microturn_client._points import Points


@pytest.fixture
def points():
    """As in the module's docstring."""
    points = Points()
    points.add(1, 1)
    points.add(2, 2)
    points.add(3, 2)
    points.cut(1)
    points.add(4, 1)
    points.add(5, 2)
    return points


def found(points):
    return [points.find(number) for number in range(7)]


def test_each_number_has_its_point_until_it_is_cut_away(points):
    assert found(points) == [None, 1, None, None, 1, 2, None]
    assert points.num_bytes == 3 * 8


def test_numbers_that_are_given_again_take_the_place_of_those_before(points):
    points.keep_up_to(4)
    assert found(points) == [None, 1, None, None, 1, None, None]
    points.add(4, 3)
    assert found(points) == [None, 1, None, None, 3, None, None]
